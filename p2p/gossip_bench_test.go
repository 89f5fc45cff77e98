package p2p

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/metrics"
	"github.com/libp2p/go-libp2p/core/network"
)

// swarmOf starts n hosts on loopback that gossip, with about degree connections each.
func swarmOf(b testing.TB, n, degree int) (counts []*metrics.BandwidthCounter, topics []*Topic) {
	b.Helper()
	var hosts []*Host
	for range n {
		count := metrics.NewBandwidthCounter()
		cfg := testConfig(b)
		cfg.Logger, cfg.Listen = nil, []string{"/ip4/127.0.0.1/tcp/0"}
		h, err := NewOn(cfg, func(options ...libp2p.Option) (host.Host, error) {
			return libp2p.New(append(options, libp2p.NoListenAddrs, libp2p.DisableMetrics(), libp2p.Ping(false),
				libp2p.BandwidthReporter(count), libp2p.ResourceManager(&network.NullResourceManager{}))...)
		})
		if err != nil {
			b.Fatal(err)
		}
		h.hearts.waited = newRunDelay().since
		topic, err := h.JoinTopic(TopicConfig{Name: testTopic, MaxBody: 1000})
		if err != nil {
			b.Fatal(err)
		}
		if err := h.Start(); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { h.Close() })
		hosts, counts, topics = append(hosts, h), append(counts, count), append(topics, topic)
	}
	for i, h := range hosts {
		for k := 1; k <= min(degree/2, n/2); k++ {
			if _, err := h.Hello(context.Background(), infoOf(b, hosts[(i+k*k)%n])); err != nil && (i+k*k)%n != i {
				b.Fatal(err)
			}
		}
	}
	return counts, topics
}

// BenchmarkGossipAtRest measures what a node sends and receives at rest, by protocol: each
// announces 400 bytes every 30 s. One iteration is a minute.
//
//	KVASIR_GOSSIP_NODES=100 go test ./p2p -run '^$' -bench GossipAtRest -benchtime 1x
func BenchmarkGossipAtRest(b *testing.B) {
	sizes := []int{3, 25}
	if s := os.Getenv("KVASIR_GOSSIP_NODES"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			b.Fatal(err)
		}
		sizes = []int{n}
	}
	for _, n := range sizes {
		b.Run(fmt.Sprintf("%d", n), func(b *testing.B) {
			counts, topics := swarmOf(b, n, 16)
			announce := func(stop <-chan struct{}, i int, t *Topic) {
				pause := time.NewTimer(time.Duration(i) * 30 * time.Second / time.Duration(n))
				defer pause.Stop()
				for {
					select {
					case <-pause.C:
						if err := t.Publish(make([]byte, 400), 90*time.Second); err != nil {
							b.Error(err)
						}
						pause.Reset(30 * time.Second)
					case <-stop:
						return
					}
				}
			}
			stop := make(chan struct{})
			var announcers sync.WaitGroup
			for i, t := range topics {
				announcers.Go(func() { announce(stop, i, t) })
			}
			defer announcers.Wait()
			defer close(stop)
			time.Sleep(45 * time.Second) // meshes form, everybody has spoken
			for _, c := range counts {
				c.Reset()
			}
			b.ResetTimer()
			for b.Loop() {
				time.Sleep(time.Minute)
			}
			b.StopTimer()
			var mesh, pulls, beats, all float64
			for _, c := range counts {
				for id, s := range c.GetBandwidthByProtocol() {
					switch {
					case id == topics[0].g.meshProtocol():
						mesh += float64(s.TotalOut)
					case id == topics[0].g.h.protocolID(pullProtocol):
						pulls += float64(s.TotalOut)
					case id == topics[0].g.h.protocolID(ctlProtocol):
						beats += float64(s.TotalOut)
					}
				}
				all += float64(c.GetBandwidthTotals().TotalOut)
			}
			per := 1 / float64(n) / float64(b.N)
			b.ReportMetric(mesh*per, "mesh-B/node/min")
			b.ReportMetric(pulls*per, "pull-B/node/min")
			b.ReportMetric(beats*per, "heartbeat-B/node/min")
			b.ReportMetric(all*per, "all-B/node/min")
			for i, t := range topics {
				for fault, times := range t.g.h.Faults() {
					if times > 0 {
						b.Logf("node %d: %v, %d times; refused %v", i, fault, times, t.g.h.GossipStats().Refused)
					}
				}
				if got := len(t.Latest()); got != n {
					b.Errorf("node %d knows %d of %d", i, got, n)
				}
			}
		})
	}
}
