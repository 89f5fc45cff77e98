package p2p

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/libp2p/go-libp2p"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/x/simlibp2p"
	"github.com/marcopolo/simnet"
)

// A node that left is not heard of again, however late somebody repeats what it said; one
// that comes back counts, once.
func TestDepartedPeerStaysAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := &simnet.Simnet{LatencyFunc: simnet.StaticLatency(20 * time.Millisecond)}
		link := simnet.NodeBiDiLinkSettings{
			Downlink: simnet.LinkSettings{BitsPerSecond: 20 * simlibp2p.OneMbps},
			Uplink:   simnet.LinkSettings{BitsPerSecond: 20 * simlibp2p.OneMbps},
		}
		n := 0
		start := func(id Identity) (*Host, *Topic) {
			cfg := testConfig(t)
			cfg.Identity, cfg.Logger = id, nil
			cfg.Listen = []string{fmt.Sprintf("/ip4/1.2.3.%d/udp/8000/quic-v1", n+1)}
			n++
			h, err := NewOn(cfg, func(options ...libp2p.Option) (host.Host, error) {
				return libp2p.New(append(options, libp2p.NoListenAddrs, simlibp2p.QUICSimnet(net, link),
					libp2p.DisableIdentifyAddressDiscovery(), libp2p.ResourceManager(&network.NullResourceManager{}),
					libp2p.DisableMetrics(), libp2p.Ping(false))...)
			})
			if err != nil {
				t.Fatal(err)
			}
			topic, err := h.JoinTopic(TopicConfig{Name: testTopic, MaxBody: 100})
			if err != nil {
				t.Fatal(err)
			}
			if err := h.Start(); err != nil {
				t.Fatal(err)
			}
			return h, topic
		}
		var ids []Identity
		for range 3 {
			id, err := NewIdentity()
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, id)
		}
		net.Start()
		defer net.Close()
		a, ta := start(ids[0])
		defer a.Close()
		b, tb := start(ids[1])
		defer b.Close()
		c, tc := start(ids[2])
		hello(t, b, a)
		hello(t, c, a)
		time.Sleep(10 * time.Second)
		if err := tc.Publish([]byte("serving"), 10*time.Minute); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		for _, topic := range []*Topic{ta, tb} {
			if latestOf(topic, ids[2].ID()) != "serving" {
				t.Fatal("news did not arrive")
			}
		}
		said := tc.authors[ids[2].ID()].raw
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		for range 9 {
			ta.take(b.ID(), said, false)
			tb.take(a.ID(), said, true)
			if len(ta.Latest()) != 0 || len(tb.Latest()) != 0 {
				t.Fatal("the departed is back")
			}
			time.Sleep(10 * time.Minute)
		}
		c, tc = start(ids[2])
		defer c.Close()
		hello(t, c, a)
		if err := tc.Publish([]byte("back"), time.Minute); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		if latestOf(tb, ids[2].ID()) != "back" || len(tb.Latest()) != 1 {
			t.Errorf("the returned is not heard of: %v", tb.Latest())
		}
	})
}
