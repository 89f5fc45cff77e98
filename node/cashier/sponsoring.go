package cashier

import "kvasird/settle"

// Limits of what the fee payer pays for nothing, of one entry node within wastedFor.
const (
	maxWasted    = 32  // x402 payments of which all went back
	maxSponsored = 256 // and those of which that is not known yet
	wastedFor    = 3600
	// maxSponsors is how many entry nodes are told apart. Those beyond share a count.
	maxSponsors = 4096
)

// sponsored is a transaction that the fee payer signed.
type sponsored struct {
	id settle.QuoteID
	at uint64 // Unix seconds
}

// sponsors refuses the fee payer's signature to an entry node whose x402 payments came to
// nothing too often.
func (d *Desk) sponsors(node settle.Node) error {
	now := d.seconds()
	d.mu.Lock()
	defer d.mu.Unlock()
	node = d.sponsorOf(node, now)
	var kept []sponsored
	wasted, oldest := 0, now
	for _, s := range d.fees[node] {
		if now >= s.at+wastedFor {
			continue
		}
		r, err := d.cfg.Books.Request(s.id)
		if err != nil {
			return err
		}
		if r.Tokens > 0 {
			continue
		}
		if r.State > settle.Running {
			wasted++
		}
		oldest = min(oldest, s.at)
		kept = append(kept, s)
	}
	d.fees[node] = kept
	if wasted < maxWasted && len(kept) < maxSponsored {
		return nil
	}
	return &Refusal{Code: CodeBusy, Field: "transaction", Retry: oldest + wastedFor - now,
		Text: "too many x402 payments of this node came to nothing within an hour: pay from a wallet of your own, and name the signature"}
}

// sponsored notes what the fee payer signed.
func (d *Desk) sponsored(q settle.Quote) {
	now := d.seconds()
	d.mu.Lock()
	defer d.mu.Unlock()
	node := d.sponsorOf(q.Entry, now)
	d.fees[node] = append(d.fees[node], sponsored{q.ID, now})
}

// sponsorOf is under which node another one is counted. The caller holds mu.
func (d *Desk) sponsorOf(node settle.Node, now uint64) settle.Node {
	if _, ok := d.fees[node]; ok || len(d.fees) < maxSponsors {
		return node
	}
	for n, list := range d.fees {
		if len(list) == 0 || now >= list[len(list)-1].at+wastedFor {
			delete(d.fees, n)
		}
	}
	if len(d.fees) < maxSponsors {
		return node
	}
	return settle.Node{}
}
