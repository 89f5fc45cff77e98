package market

import (
	"math"
	"slices"
	"time"
)

const (
	restPeriod  = 30 * time.Second // between announcements, and their renewals, in a small swarm
	restPeers   = 10               // up to which a swarm is small
	maxPeriod   = 20 * time.Hour   // with its renewals less than a day, for which p2p lets one live
	renewPeers  = 100              // up to which renewals come every restPeriod
	maxRenew    = 15 * time.Minute
	hurryGap    = 2 * time.Second // between two announcements, whatever changed
	hurryMost   = 8               // announcements of changes in a while
	hurryPeriod = time.Minute     // that while, for each started hurryPeers peers
	hurryPeers  = 200
	hurryLimit  = 10 // at most so many hurryPeriods
)

// AnnounceEvery returns how often a node that has nothing new to say announces itself in a swarm
// of so many peers: every 30 s up to 10 peers, then more rarely in proportion, so that what
// gossip costs a node is the same in a larger swarm; 5 min for 100, 50 min for 1,000, 500 min for
// 10,000, never more than 20 h, which is more than for all that a table holds. Between, it is
// renewed.
func AnnounceEvery(peers int) time.Duration {
	most := int(maxPeriod / restPeriod * restPeers)
	return restPeriod * time.Duration(min(max(peers, restPeers), most)) / restPeers
}

// RenewEvery returns how often such an announcement is renewed, which costs a twentieth of it:
// every 30 s up to 100 peers, 69 s for 1,000, 6½ min for 10,000, never more than 15 min; so that
// what that costs a node grows as the logarithm of the swarm.
func RenewEvery(peers int) time.Duration {
	n := float64(max(peers, renewPeers))
	d := time.Duration(float64(restPeriod) * n / renewPeers / math.Log2(2*n/renewPeers))
	return min(d, maxRenew).Round(time.Second)
}

// Validity returns how long an announcement is valid after it, or its latest renewal, was due:
// two may be lost.
func Validity(peers int) time.Duration { return 3 * RenewEvery(peers) }

// Pace says when to announce: at once when something changed, but at least 2 s apart and at most
// 8 times a minute for changes, or in a minute for each 200 peers of up to 2,000; else every
// AnnounceEvery, of which each node leaves out up to a tenth so that they do not announce
// together. A swarm that grows meanwhile does not make it late. The zero value is ready.
type Pace struct {
	sent   [hurryMost]time.Time // a ring of the latest
	n      int
	period time.Duration // that the validity of the latest was made for
}

// Next returns when the next announcement is due.
func (p *Pace) Next(id string, peers int, changed bool) time.Time {
	if p.n == 0 {
		return time.Time{}
	}
	last := p.sent[(p.n-1)%hurryMost]
	period := min(AnnounceEvery(peers), p.period)
	rest := last.Add(period - time.Duration(mix(hash(id), uint64(p.n))%uint64(period/10)))
	if !changed {
		return rest
	}
	soon := last.Add(hurryGap)
	if p.n >= hurryMost {
		while := hurryPeriod * time.Duration(min(max(1, peers/hurryPeers), hurryLimit))
		if full := p.sent[p.n%hurryMost].Add(while); full.After(soon) {
			soon = full
		}
	}
	if rest.Before(soon) {
		return rest
	}
	return soon
}

// Sent tells that an announcement was published, valid for Validity(peers). One of what is being
// loaded is due again before that is taken for stalled: renewals make no lease longer.
func (p *Pace) Sent(now time.Time, peers int, a *Announcement) {
	p.period = AnnounceEvery(peers)
	if a.loads() {
		p.period = min(p.period, MaxLease/2)
	}
	p.sent[p.n%hurryMost] = now
	p.n++
}

func (a *Announcement) loads() bool {
	return slices.ContainsFunc(a.Models, func(m ModelNews) bool {
		return slices.ContainsFunc(m.Holdings, func(h Holding) bool { return h.State == Loading }) ||
			slices.ContainsFunc(m.Windows, func(w WindowHolding) bool { return w.State == Loading })
	})
}
