package market

import "time"

// clockSkew is by how much an author's clock may be ahead of the node's.
const clockSkew = time.Minute

// roomLocked makes room for a record, and an author of it if there is none.
func (t *Table) roomLocked(x *author, r Record, now time.Time) (*author, error) {
	had := 0
	if x != nil {
		had = x.body
	}
	if x == nil && len(t.authors) >= MaxAuthors || t.bodies-had+len(r.Body) > MaxBodies {
		t.sweepLocked(now)
		if x = t.authors[r.From]; x == nil {
			had = 0
		}
	}
	if x == nil && len(t.authors) >= MaxAuthors || t.bodies-had+len(r.Body) > MaxBodies {
		return nil, refuse(Full, "%d authors, %d bytes of announcements", len(t.authors), t.bodies)
	}
	if x == nil {
		t.arrived++
		x = &author{id: r.From, hash: hash(r.From), arrival: t.arrived}
		t.authors[r.From] = x
	}
	x.body = len(r.Body)
	t.bodies += x.body - had
	return x, nil
}

// Renew takes in that an author has renewed a record, at an instant; its Validity is what it has
// grown to. A record that the table forgot meanwhile is taken in again. It reports whether what is
// counted has changed.
//
// A renewal is as old as its instant, by the author's clock: one from before the node saw that the
// author is gone, or up to a minute later, does not bring it back.
func (t *Table) Renew(r Record, at, now time.Time) (changed bool, err error) {
	expires := r.Issued.Add(r.Validity)
	if !now.Before(expires) {
		return false, nil
	}
	t.mu.Lock()
	x := t.authors[r.From]
	if x == nil {
		t.mu.Unlock()
		return t.Update(r, now)
	}
	defer t.mu.Unlock()
	if x.seq != r.Seq || !expires.After(x.expires) {
		return false, nil
	}
	if expires.After(x.forget) {
		x.forget = expires
	}
	if x.present && x.next.Equal(x.expires) {
		x.expires, x.next = expires, expires
		t.dueLocked(expires)
		return false, nil
	}
	t.uncountLocked(x)
	x.expires = expires
	x.lost = x.lost && !at.After(x.lostAt.Add(clockSkew))
	t.countLocked(x, now)
	return x.present, nil
}

// Lost tells that the node saw by itself that a peer is gone: nothing of it counts until it
// publishes a newer record, renews the one that it has later than that, or is met.
func (t *Table) Lost(id string, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if x := t.authors[id]; x != nil {
		x.lost, x.lostAt = true, now
		t.uncountLocked(x)
	}
}

// Met tells that the node is in direct contact with a peer.
func (t *Table) Met(id string, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if x := t.authors[id]; x != nil && x.lost {
		x.lost = false
		t.countLocked(x, now)
	}
}

// Peers counts the authors with a valid record that are neither lost nor away.
func (t *Table) Peers(now time.Time) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	return t.peers
}
