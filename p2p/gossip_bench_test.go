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
	"github.com/libp2p/go-libp2p/core/protocol"
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

// gossipPace is how a node that has nothing new to say keeps what it said.
type gossipPace struct {
	name  string
	every func(nodes int) time.Duration // announced again
	step  time.Duration                 // renewed, 0: not
}

var gossipPaces = []gossipPace{
	{"repeated", func(int) time.Duration { return 30 * time.Second }, 0},
	// As market.AnnounceEvery and market.RenewEvery have it up to 100 nodes.
	{"renewed", func(nodes int) time.Duration { return 3 * time.Second * time.Duration(max(nodes, 10)) }, 30 * time.Second},
}

// BenchmarkGossipAtRest measures what a node sends at rest, by protocol: each has announced 400
// bytes, which it repeats every 30 s, or repeats more rarely and renews every 30 s. One iteration
// is a minute.
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
		for _, pace := range gossipPaces {
			b.Run(fmt.Sprintf("%d/%s", n, pace.name), func(b *testing.B) { benchAtRest(b, n, pace) })
		}
	}
}

func benchAtRest(b *testing.B, n int, pace gossipPace) {
	counts, topics := swarmOf(b, n, 16)
	stop := make(chan struct{})
	var announcers sync.WaitGroup
	for i, t := range topics {
		announcers.Go(func() {
			if err := keepAnnounced(t, i, n, pace, stop); err != nil {
				b.Error(err)
			}
		})
	}
	defer announcers.Wait()
	defer close(stop)
	time.Sleep(75 * time.Second) // meshes form, everybody has spoken and renews
	for _, c := range counts {
		c.Reset()
	}
	b.ResetTimer()
	for b.Loop() {
		time.Sleep(time.Minute)
	}
	b.StopTimer()
	var all float64
	by := map[protocol.ID]float64{}
	for _, c := range counts {
		for id, s := range c.GetBandwidthByProtocol() {
			by[id] += float64(s.TotalOut)
		}
		all += float64(c.GetBandwidthTotals().TotalOut)
	}
	per, g := 1/float64(n)/float64(b.N), topics[0].g
	b.ReportMetric(by[g.meshProtocol()]*per, "mesh-B/node/min")
	b.ReportMetric(by[g.h.protocolID(renewProtocol)]*per, "renewals-B/node/min")
	b.ReportMetric(by[g.h.protocolID(pullProtocol)]*per, "pull-B/node/min")
	b.ReportMetric(by[g.h.protocolID(ctlProtocol)]*per, "heartbeat-B/node/min")
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
}

// keepAnnounced has one of n nodes say something, in its turn, and keep to it.
func keepAnnounced(t *Topic, i, n int, pace gossipPace, stop <-chan struct{}) error {
	body := make([]byte, 400)
	say := func() error {
		if pace.step > 0 {
			return t.Keep(body, 3*pace.step, pace.step)
		}
		return t.Publish(body, 90*time.Second)
	}
	next := time.NewTimer(time.Duration(i) * 30 * time.Second / time.Duration(n))
	defer next.Stop()
	for first := true; ; first = false {
		select {
		case <-next.C:
		case <-stop:
			return nil
		}
		if err := say(); err != nil {
			return err
		}
		pause := pace.every(n)
		if first { // from then on, evenly over the time
			pause = 30*time.Second + time.Duration(i)*pause/time.Duration(n)
		}
		next.Reset(pause)
	}
}
