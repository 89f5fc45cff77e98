package market

import "time"

const (
	restPeriod = 30 * time.Second // between announcements in a small swarm
	restPeers  = 100              // up to which a swarm is small
	maxPeriod  = 10 * time.Minute
	hurryGap   = 2 * time.Second // between two announcements, whatever changed
	hurryMost  = 8               // announcements of changes in a period, or in a minute if that is longer
)

// AnnounceEvery returns how often a node that has nothing new to say announces itself in a swarm
// of so many peers: every 30 s up to 100 peers, then more rarely in proportion, so that what
// gossip costs a node is the same in a larger swarm; 5 min for 1,000, never more than 10 min.
func AnnounceEvery(peers int) time.Duration {
	most := int(maxPeriod / restPeriod * restPeers)
	return restPeriod * time.Duration(min(max(peers, restPeers), most)) / restPeers
}

// Validity returns how long such an announcement is valid: two may be lost.
func Validity(peers int) time.Duration { return 3 * AnnounceEvery(peers) }

// Pace says when to announce: at once when something changed, but at least 2 s apart and at most
// 8 times a minute or period, the longer, for changes; else every AnnounceEvery, of which each
// node leaves out up to a tenth so that they do not announce together. A swarm that grows
// meanwhile does not make it late: what was announced last is renewed while it is valid. The zero
// value is ready.
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
		if full := p.sent[p.n%hurryMost].Add(max(period, time.Minute)); full.After(soon) {
			soon = full
		}
	}
	if rest.Before(soon) {
		return rest
	}
	return soon
}

// Sent tells that an announcement was published, valid for Validity(peers).
func (p *Pace) Sent(now time.Time, peers int) {
	p.period = AnnounceEvery(peers)
	p.sent[p.n%hurryMost] = now
	p.n++
}
