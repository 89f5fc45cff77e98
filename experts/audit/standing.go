package audit

import (
	"fmt"
	"math"
	"time"
)

const (
	// OutScore is the score from which on a worker gets no calls. A finding of wrong work adds
	// wrongScore, one of drift driftScore; a score halves every HalfLife. So wrong work costs an hour,
	// and more when it is found again before it is forgotten: at most four hours and some. Of drift it
	// takes six findings in a few minutes: one who rounds otherwise than it says drifts in nearly every
	// audit, an honest one may in a rare row that no measurement has met.
	OutScore   = 0.5
	wrongScore = 1
	driftScore = 0.1
	mostScore  = 16
	HalfLife   = time.Hour
)

// Standing is how a worker stands with one who has experts computed by it. The zero value is one of
// whom nothing is known.
type Standing struct {
	Audited uint64 // answers that were computed again elsewhere
	Alike   uint64 // of these, as they should be
	Found   uint64 // of these, drift or wrong work
	Reason  string // of the latest finding, for people

	score float64 // at the time at
	at    time.Time
}

// Score is what is left of findings.
func (s *Standing) Score(now time.Time) float64 {
	return s.score * math.Exp2(-max(0, float64(now.Sub(s.at)))/float64(HalfLife))
}

// Take adds what an audit came to, with why.
func (s *Standing) Take(o Outcome, reason string, now time.Time) {
	s.Audited++
	add := 0.0
	switch o {
	case Alike:
		s.Alike++
	case Drift:
		add = driftScore
	case Wrong:
		add = wrongScore
	}
	if add > 0 {
		s.Found++
		s.score, s.at, s.Reason = min(mostScore, s.Score(now)+add), now, reason
	}
}

// Until is when a worker gets calls again; in the past, or zero, if it gets them.
func (s *Standing) Until(now time.Time) time.Time {
	score := s.Score(now)
	if score < OutScore {
		return time.Time{}
	}
	return now.Add(time.Duration(math.Ceil(math.Log2(score/OutScore)*float64(HalfLife)) + 1))
}

// Text says how a worker stands, for people; empty while nothing is known.
func (s *Standing) Text(now time.Time) string {
	switch until := s.Until(now); {
	case s.Audited == 0:
		return ""
	case !until.IsZero():
		return fmt.Sprintf("no calls for %v: %s", until.Sub(now).Round(time.Minute), s.Reason)
	case s.Found > 0 && s.Score(now) > OutScore/mostScore:
		return fmt.Sprintf("trusted again, %d of %d answers that were checked are right: %s", s.Alike, s.Audited, s.Reason)
	}
	return fmt.Sprintf("%d of %d answers that were checked are right", s.Alike, s.Audited)
}
