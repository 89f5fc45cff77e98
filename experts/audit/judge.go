package audit

import (
	"fmt"

	"kvasird/experts/tolerance"
)

// SlashFactor is how many times the band of two backends an answer must be off to be wrong work,
// for which economics has a penalty, and not drift.
const SlashFactor = 10

// RoundingStep is the least band of backends that round rows to 8 bits on the way, as CPUs do for
// quantised weights: they agree to a few millionths, but for one row in some hundreds in which a sum
// lay between two steps. Measured over 20,800 rows of the shipped model and five x86 variants, that
// is 0.011 at most (go test -run NobodyHonest ./experts/audit). Sums in f16 are off by 0.034 on
// average.
const RoundingStep = 0.025

// Answer is the rows that one computed for the pairs of an audit, one after the other.
type Answer struct {
	By   string // peer id; "": the own copy, which is right
	Rows []float32
}

// Bands says how far the rows of two may be apart, as tolerance.Delta's Max measures it; "" is the own copy.
type Bands func(a, b string) float64

// Outcome is what a comparison came to.
type Outcome uint8

// The outcomes.
const (
	Alike Outcome = 1 + iota // within the band
	Open                     // two differ, and nobody says which one is wrong
	Drift                    // beyond the band
	Wrong                    // beyond SlashFactor bands
)

func (o Outcome) String() string {
	return [...]string{"none", "alike", "open", "drift", "wrong"}[min(o, Wrong)]
}

// Finding is what an audit says of one who answered.
type Finding struct {
	Outcome  Outcome
	Culprit  string   // of Drift and Wrong
	Against  []string // who agree with each other and not with the culprit; of Open all who differ
	Pair     int      // of the row that is off most
	Distance float64  // there
	Band     float64  // what was allowed there
}

// Text says what is wrong, for people; of Alike it is empty.
func (f Finding) Text() string {
	if f.Outcome == Alike {
		return ""
	}
	than := fmt.Sprintf("those of %d others", len(f.Against))
	if len(f.Against) == 1 && f.Against[0] == "" {
		than = "the own copy"
	}
	if f.Outcome == Open {
		than = "another replica, and nobody else holds the expert to say which one is wrong"
	}
	return fmt.Sprintf("what it computed is off by %.2g from %s, where %.2g is allowed", f.Distance, than, f.Band)
}

// gap is how far two answers are apart, at the pair where that is most.
func gap(width int, a, b Answer, bands Bands) (f Finding) {
	f.Band, f.Outcome = bands(a.By, b.By), Alike
	for i := 0; (i+1)*width <= len(a.Rows); i++ {
		if d := tolerance.Between(a.Rows[i*width:][:width], b.Rows[i*width:][:width]).Max; d > f.Distance {
			f.Pair, f.Distance = i, d
		}
	}
	switch {
	case f.Distance > SlashFactor*f.Band:
		f.Outcome = Wrong
	case f.Distance > f.Band:
		f.Outcome = Drift
	}
	return f
}

// Judge compares answers of so many elements a row, of at least two, each of another and of as many
// rows. It returns those who are wrong, or one Open finding if some differ and it is not known who is
// wrong: then somebody else is to be asked, if there is one. If all are alike it returns nothing.
func Judge(width int, answers []Answer, bands Bands) []Finding {
	for i, a := range answers {
		if a.By == "" {
			return besideOwn(width, i, answers, bands)
		}
	}
	n := len(answers)
	gaps := make([][]Finding, n)
	worst := Finding{Outcome: Alike}
	for i := range n {
		gaps[i] = make([]Finding, n)
		for j := range i {
			g := gap(width, answers[i], answers[j], bands)
			gaps[i][j], gaps[j][i] = g, g
			if g.Outcome != Alike && g.Distance >= worst.Distance {
				worst = Finding{Outcome: Open, Against: []string{answers[i].By, answers[j].By}, Pair: g.Pair, Distance: g.Distance, Band: g.Band}
			}
		}
	}
	if worst.Outcome == Alike {
		return nil
	}
	if found := outvoted(answers, gaps); found != nil {
		return found
	}
	return []Finding{worst}
}

// besideOwn judges by the own copy.
func besideOwn(width, own int, answers []Answer, bands Bands) (found []Finding) {
	for i, a := range answers {
		if i == own {
			continue
		}
		if f := gap(width, a, answers[own], bands); f.Outcome != Alike {
			f.Culprit, f.Against = a.By, []string{""}
			found = append(found, f)
		}
	}
	return found
}

// outvoted finds those who differ from all of a majority of at least two whose answers are alike.
// What is said of one is the mildest of what the majority says of it.
func outvoted(answers []Answer, gaps [][]Finding) (found []Finding) {
	for first := range answers {
		var agree, differ []int
		for i := range answers {
			if i == first || gaps[i][first].Outcome == Alike {
				agree = append(agree, i)
			} else {
				differ = append(differ, i)
			}
		}
		if len(agree) < 2 || len(agree) <= len(differ) || !apart(gaps, agree, differ) {
			continue
		}
		for _, d := range differ {
			f := gaps[d][agree[0]]
			for _, a := range agree {
				if g := gaps[d][a]; g.Distance/g.Band < f.Distance/f.Band {
					f = g
				}
			}
			f.Culprit, f.Against = answers[d].By, nil
			for _, a := range agree {
				f.Against = append(f.Against, answers[a].By)
			}
			found = append(found, f)
		}
		return found
	}
	return nil
}

// apart says whether all of a group are alike, and none of them like any of the others.
func apart(gaps [][]Finding, group, others []int) bool {
	for n, i := range group {
		for _, j := range group[:n] {
			if gaps[i][j].Outcome != Alike {
				return false
			}
		}
		for _, j := range others {
			if gaps[i][j].Outcome == Alike {
				return false
			}
		}
	}
	return len(others) > 0
}
