package engine

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"kvasird/ggml"
	"kvasird/ring/draft"
)

// Drafts says how answers are drafted.
type Drafts struct {
	// Resident says whether some experts are here, so that a guess without the others is worth
	// something; nil: none are. It is asked in every round.
	Resident func() bool
	// Least is what a round must take for drafts to be tried: quicker ones are left as they are,
	// sums included. 0 = 10 ms.
	Least time.Duration
	// Paid says that who computes is paid for the tokens of answers: wrong guesses are kept few.
	Paid bool
}

const (
	// learnOne and learnAll are the weights of a guess, for its answer and for those that begin.
	learnOne  = 1 / 8.
	learnAll  = 1 / 32.
	learnText = 1 / 4.
	// forget is the weight of a round without guesses.
	forget = 1 / 256.
	// pauseAfter are rounds without drafts after one failed that had some: somebody may be missing
	// whom only guesses need.
	pauseAfter = 64
)

// drafting is what a lane knows of drafts. It is the loop's.
type drafting struct {
	*Drafts                // nil: there are none
	costs    draft.Costs   // of rounds of answers only
	all      guessed       // of all answers
	least    float64       // how likely a guess has to be, with those before, to be made
	pause    int           // rounds until drafts are tried again
	measured bool          // the round in progress tells of costs
	spent    time.Duration // of the round in progress, for its guesses
	guesses  []draft.Guess
	k        []int
}

// guessed is what is known of drafts: of one answer, which begins with what is known of all.
type guessed struct {
	begun bool
	text  [draft.Matches]draft.Share // right ones of what stood behind an earlier match, by its length
	here  draft.Share                // right ones of those with the experts that are here
	sure  sureness                   // likewise
}

// sureness is the share of guesses that are right by how far their logit is above the next one's:
// below 1/2, 1, 2, 4, 8, or more.
type sureness [6]draft.Share

// firstSure is of guesses of which nothing is known.
var firstSure = sureness{0.3, 0.45, 0.6, 0.8, 0.9, 0.97}

func sureClass(above float32) (class int) {
	for limit := float32(0.5); class < len(sureness{})-1 && above >= limit; limit *= 2 {
		class++
	}
	return class
}

// guess is what a slot drafts in the round in progress.
type guess struct {
	drafts []ggml.Token
	text   []ggml.Token // what stood behind an earlier match, used or not
	class  int          // of that match
	sure   []int        // of each of drafts that was guessed by a pass: its sureClass
	hope   float64      // how likely all of these are right
	want   int          // tokens to guess with the experts that are here
	passed bool         // such a pass left cells
	tried  bool         // there were some to guess with
}

func (g *guess) reset() {
	*g = guess{drafts: g.drafts[:0], text: g.text[:0], sure: g.sure[:0], hope: 1}
}

// whyNoDrafts says why answers of a model are never drafted; "": they may be.
func whyNoDrafts(m *ggml.Model) string {
	switch {
	case !m.CanTruncate():
		return "the model's memory cannot take back a token"
	case m.Window() > 0:
		return "the model's sliding windows cannot take back a token for certain"
	}
	return ""
}

// draft guesses what comes behind the next token of every answer, as much of it as pays. Beside
// prompts nothing is drafted. False: the batch has to be planned again.
func (l *lane) draft(ctx context.Context, busy []*slot) bool {
	d := &l.drafting
	d.measured, d.spent = false, 0
	for _, s := range busy {
		s.guess.reset()
	}
	for _, s := range busy {
		if d.Drafts == nil || s.take > 1 || s.pending() > 1 || s.g.canary {
			return true
		}
	}
	d.measured = true
	if d.pause > 0 {
		d.pause--
		return true
	}
	if d.costs.Time(len(busy)) < d.Least {
		return true
	}
	d.plan(busy, (l.cfg.Batch-len(busy))/len(busy))
	if !l.guessHere(ctx, busy) {
		return false
	}
	drafted := 0
	for _, s := range busy {
		drafted += len(s.guess.drafts)
	}
	if drafted == 0 && d.spent == 0 {
		d.costs.Forget(forget)
	}
	l.count(func(st *Stats) { st.Drafted += int64(drafted); st.Busy += d.spent })
	return true
}

// plan takes what the texts give, and says how much is to be guessed beside.
func (d *drafting) plan(busy []*slot, most int) {
	here := d.Resident != nil && d.Resident()
	d.guesses, d.k = d.guesses[:0], d.k[:0]
	for _, s := range busy {
		q, known := &s.guess, &s.g.guessed
		if !known.begun {
			*known = d.all
			known.begun = true
		}
		one := draft.Guess{Most: min(most, s.g.left-1)}
		if d.Paid {
			one.Most = min(one.Most, draft.Spare(len(s.g.tokens), s.g.wrong))
		}
		if at, n := draft.LookUp(s.g.tokens); n > 0 {
			q.class = n - draft.ShortestMatch
			q.text = draft.Follow(q.text, s.g.tokens, at, draft.Most)
			one.Accept = known.text[q.class].Get()
		}
		if q.tried = here; here && known.here.Get() > one.Accept {
			one.Accept, one.Passes = known.here.Get(), true
		}
		d.guesses, d.k = append(d.guesses, one), append(d.k, 0)
	}
	d.least = d.costs.Least(d.costs.Plan(d.guesses, d.k))
	for i, s := range busy {
		if d.guesses[i].Passes && d.k[i] > 0 {
			s.guess.want = min(d.guesses[i].Most, draft.Most) // or until it is not sure any more
		} else if !d.guesses[i].Passes {
			s.guess.drafts = append(s.guess.drafts, s.guess.text[:d.k[i]]...)
		}
	}
}

// guessHere computes guesses with the experts that are here, a token of every sequence that wants
// one in each pass, and drops the cells of that. False: the memory could not.
func (l *lane) guessHere(ctx context.Context, busy []*slot) bool {
	d := &l.drafting
	if !slices.ContainsFunc(busy, func(s *slot) bool { return s.guess.want > 0 }) {
		return true
	}
	began := l.cfg.Now()
	for depth := 0; l.batchGuesses(busy, depth); depth++ {
		start := l.cfg.Now()
		_, err := l.turn(ctx, func(ctx context.Context) error { return l.ctx.Draft(ctx, l.batch) })
		if err != nil {
			if d.pause = pauseAfter; ctx.Err() == nil && !errors.Is(err, ggml.ErrNoRoom) {
				l.cfg.Logger.Warn("a draft failed", "error", err)
			}
			break
		}
		d.costs.Drafted(l.cfg.Now().Sub(start))
		for _, s := range busy {
			if depth < s.guess.want {
				l.takeGuess(s)
			}
		}
	}
	ok := true
	for _, s := range busy {
		if s.guess.passed {
			ok = l.takeBack(s) && ok
		}
	}
	d.spent = l.cfg.Now().Sub(began)
	return ok
}

// takeBack drops the cells behind what a slot has. Where the memory cannot, whatever the architecture
// promised, all of the sequence is read again, and nothing is drafted any more.
func (l *lane) takeBack(s *slot) bool {
	before := s.past
	l.rewind(s)
	if s.past == before {
		return true
	}
	l.drafting.Drafts = nil
	l.count(func(st *Stats) { st.NoDrafts = "the model's memory could not take back a token" })
	return false
}

// batchGuesses makes the batch of a pass: of every sequence the token behind which one is wanted.
func (l *lane) batchGuesses(busy []*slot, depth int) bool {
	l.batch.Reset()
	for _, s := range busy {
		if depth < s.guess.want {
			s.out, s.guess.passed = l.batch.Len(), true
			t := s.g.tokens[s.past]
			if depth > 0 {
				t = s.guess.drafts[depth-1]
			}
			l.batch.Add(t, s.past+depth, s.seq, true)
		}
	}
	return l.batch.Len() > 0
}

// takeGuess drafts the likeliest token of a pass. Behind the end of an answer nothing is drafted, and
// behind guesses that are hardly all right.
func (l *lane) takeGuess(s *slot) {
	logits := l.ctx.Logits(s.out)
	for t, b := range s.g.bias {
		logits[t] += b // which nobody reads any more
	}
	best, next := ggml.Token(0), float32(math.Inf(-1))
	for t, l := range logits[1:] {
		if l > logits[best] {
			next, best = logits[best], ggml.Token(t+1)
		} else {
			next = max(next, l)
		}
	}
	q := &s.guess
	class := sureClass(logits[best] - next)
	q.hope *= s.g.guessed.sure[class].Get()
	if l.cfg.Model.IsEOG(best) || q.hope < l.drafting.least {
		q.want = len(q.drafts)
		return
	}
	q.drafts, q.sure = append(q.drafts, best), append(q.sure, class)
}

// dropDrafts takes the drafts out of a batch that failed. False: it had none.
func (l *lane) dropDrafts(busy []*slot, why error) bool {
	had := false
	for _, s := range busy {
		had = had || len(s.guess.drafts) > 0
		s.guess.reset()
	}
	if !had {
		return false
	}
	l.drafting.pause = pauseAfter
	l.cfg.Logger.Debug("a batch with drafts failed, it is tried without them", "error", why)
	for _, s := range busy {
		l.rewind(s)
	}
	return true
}

// learn takes in what a slot drew in the round in progress, of which so many were drafted.
func (d *drafting) learn(s *slot, drawn []ggml.Token, accepted int) {
	q, known := &s.guess, &s.g.guessed
	switch {
	case q.passed:
		known.here.Observe(len(q.drafts), accepted, learnOne)
		d.all.here.Observe(len(q.drafts), accepted, learnAll)
		d.learnSure(s, accepted)
	case q.tried:
		known.here.Forget(forget)
		for i := range known.sure {
			known.sure[i].Forget(forget)
		}
	}
	if len(q.text) > 0 {
		compared, right := min(len(drawn), len(q.text)), commonPrefix(q.text, drawn)
		known.text[q.class].Observe(compared, right, learnText)
		d.all.text[q.class].Observe(compared, right, learnAll)
	}
}

// learnSure takes in which of the guesses of passes were right, up to the first that was not.
func (d *drafting) learnSure(s *slot, accepted int) {
	for i, class := range s.guess.sure[:min(accepted+1, len(s.guess.sure))] {
		right := 0
		if i < accepted {
			right = 1
		}
		s.g.guessed.sure[class].Observe(1, right, learnOne)
		d.all.sure[class].Observe(1, right, learnAll)
	}
}
