package meter

import (
	"context"
	"slices"
	"time"

	"kvasird/p2p"
	"kvasird/settle"
)

const (
	// judgedPasses is how many passes that a node showed have to end for which less than half of what was
	// computed is credited, before its passes are not believed.
	judgedPasses = 8
	// doubtTime is for how long, the first time; then twice as long, up to doubtMost.
	doubtTime, doubtMost = 10 * time.Minute, 24 * time.Hour
	// mostUncredited bounds what was computed by passes that a node showed and is not credited yet,
	// in tokens, and creditedTimes is how many times of what they credited it may be more.
	mostUncredited, creditedTimes = 1 << 20, 4
	// mostAhead is what of more than half that was credited counts for later, in tokens.
	mostAhead = 1 << 17

	askEvery = 10 * time.Second
	askTime  = 10 * time.Second
	askAfter = 10 * time.Second // between two questions about a pass
	askMost  = 256              // passes in one question
	// keptUnknown is how long a pass whose outcome nobody says is kept after its end.
	keptUnknown = time.Hour

	// mostStandings bounds what is known of all, and mostLenders that of one node by the passes of others.
	mostStandings, mostLenders = 4096, 64
)

// shower is who shows passes, and whose: its own, or those that an entry lends it. Each is judged
// apart, so that an entry that lends what will not be credited is alone refused for it.
type shower struct{ node, entry settle.Node }

// Credit is what came of a request: whether it is settled, and what this node was credited, in
// billionths of a token of the whole model.
type Credit struct {
	Settled bool
	Tokens  uint64
}

// standing is what is known of who shows passes. A nil one is a stranger. Work is in billionths of a
// token.
//
// Which work was for which pass is not known where requests run together, but for all of them it
// is: of passes whose outcome is known, at least balance − open more was computed than twice what
// they credited. So it is not passes that are judged, but all that a node shows of an entry.
type standing struct {
	at       time.Time // when something was shown last
	settled  uint64    // requests that credited something
	credited int64     // in all
	balance  int64     // computed by passes, less twice what was credited, at least -mostAhead
	open     int64     // what passes allow whose outcome is not known
	late     int64     // computed by passes whose outcome was known, since one became known
	bad      int       // requests that credited too little since balance - open was 0 or less
	owed     int64     // balance - open at the last of them
	strikes  int
	until    time.Time // it is doubted
}

func (st *standing) doubted(now time.Time) bool { return st != nil && now.Before(st.until) }

// usable is whether something is computed by what is shown.
func (st *standing) usable(now time.Time) bool {
	return !st.doubted(now) && st.balance <= mostUncredited*int64(settle.Whole)+creditedTimes*st.credited
}

func (st *standing) stranger() bool { return st == nil || st.settled == 0 }

func (st *standing) requests() uint64 {
	if st == nil {
		return 0
	}
	return st.settled
}

// standingLocked is that of who shows passes, in place of another one where there are too many.
func (g *Grants) standingLocked(who shower, now time.Time) *standing {
	st := g.standings[who]
	if st == nil {
		lent := func(o shower) bool { return o.node == who.node && o.entry != o.node }
		if who.entry != who.node {
			g.dropStandingLocked(mostLenders, lent)
		}
		g.dropStandingLocked(mostStandings, func(shower) bool { return true })
		st = &standing{}
		g.standings[who] = st
	}
	st.at = now
	return st
}

// dropStandingLocked forgets one of some standings where there are as many as may be: one that says
// nothing, if there is, and that by which nothing was shown for longest.
func (g *Grants) dropStandingLocked(most int, of func(shower) bool) {
	n := 0
	var name shower
	var least *standing
	for who, st := range g.standings {
		if !of(who) {
			continue
		}
		n++
		if least == nil || !st.says() && least.says() || st.says() == least.says() && st.at.Before(least.at) {
			name, least = who, st
		}
	}
	if n >= most {
		delete(g.standings, name)
	}
}

// says is whether anything was credited, or doubted.
func (st *standing) says() bool { return st.settled > 0 || st.bad > 0 || st.strikes > 0 }

// Run asks now and then what came of passes by which something was computed, until ctx ends.
func (g *Grants) Run(ctx context.Context) error {
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := g.Ask(ctx); err != nil && ctx.Err() == nil {
			g.cfg.Logger.Debug("what came of requests is not known now", "error", err)
		}
	}
}

// Ask asks once, about the passes whose outcome was not asked for longest.
func (g *Grants) Ask(ctx context.Context) error { return g.ask(ctx, askAfter) }

// AskNow is Ask for passes that were shown, or asked about, just now too.
func (g *Grants) AskNow(ctx context.Context) error { return g.ask(ctx, 0) }

func (g *Grants) ask(ctx context.Context, after time.Duration) error {
	ids := g.due(after)
	if len(ids) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	credits, err := g.cfg.Credits(ctx, ids)
	if err != nil || len(credits) != len(ids) {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, id := range ids {
		if p := g.passes[id]; p != nil && !p.concluded && credits[i].Settled {
			g.concludeLocked(p, int64(min(credits[i].Tokens, 1<<60)))
		}
	}
	return nil
}

// due are passes to ask about. Those that nothing was computed by are forgotten after their end.
func (g *Grants) due(after time.Duration) (ids []settle.QuoteID) {
	now := g.cfg.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	var list []*grant
	for _, p := range g.passes {
		switch {
		case p.over(now) && (p.concluded || p.spent() == 0 || p.over(now.Add(-keptUnknown))):
			g.forgetLocked(p)
		case !p.concluded && now.Sub(p.at) >= after && now.Sub(p.asked) >= after:
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b *grant) int { return a.asked.Compare(b.asked) })
	for _, p := range list[:min(len(list), askMost)] {
		p.asked = now
		ids = append(ids, p.pass.Request)
	}
	return ids
}

// concludeLocked takes in what a pass credited, and judges who showed it.
func (g *Grants) concludeLocked(p *grant, credited int64) {
	p.concluded = true
	for _, by := range p.by {
		by.st.open -= p.worth
		if own := (shower{by.node, by.node}); credited > 0 && by.node != p.pass.Entry {
			g.standingLocked(own, g.cfg.Now()).settled++ // it has the window of who is known
		}
		if by.st.judge(by.spent, min(credited, p.worth), g.cfg.Now()) {
			g.cfg.Logger.Warn("passes that a node shows are not believed for a while: most of what was computed by them was not credited",
				"peer", p2p.PeerOf(by.node).String(), "entry", p.pass.Entry.String(), "until", by.st.until)
		}
	}
}

// judge takes in what a pass credited that is open no more, and says whether it was one too many. One
// that credited half of what was computed by it, or after which no more is owed than before, is none:
// what is owed already was judged.
func (st *standing) judge(spent, credited int64, now time.Time) bool {
	const ahead = -mostAhead * int64(settle.Whole)
	if credited > 0 {
		st.settled++
	}
	st.credited = min(st.credited+credited, 1<<60)
	st.balance = max(st.balance-2*credited, ahead)
	spent, st.late = spent+st.late, 0
	owed := st.balance - st.open
	if owed <= 0 {
		if st.bad, st.owed = 0, 0; st.balance == ahead {
			st.strikes = 0
		}
		return false
	}
	if 2*credited >= spent || owed <= st.owed {
		return false
	}
	st.owed = owed
	if st.bad++; st.bad < judgedPasses {
		return false
	}
	st.until = now.Add(min(doubtMost, doubtTime<<min(st.strikes, 16)))
	st.strikes, st.balance, st.bad, st.owed = st.strikes+1, 0, 0, 0
	return true
}
