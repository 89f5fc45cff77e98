package settle

import (
	"errors"
	"testing"
)

func testJob(t *testing.T) Job {
	t.Helper()
	return Job{testNetwork, requestWithEntry(t), worldParts, 10, map[Node]uint64{keyOf("entry"): 1e6, keyOf("a"): 8000, keyOf("b"): 1e6}}
}

func requestWithEntry(t *testing.T) Request {
	r := requestIn(t, Running)
	r.Quote.Entry, r.Payer = keyOf("entry"), keyOf("payer")
	return r
}

func TestCreditIsTheLesser(t *testing.T) {
	j := testJob(t)
	rec := receipt(1, 100, Work{keyOf("entry"), []Line{{0, 100}, {1, 100}}}, Work{keyOf("a"), []Line{{2, 300}}}, Work{keyOf("b"), []Line{{2, 100}}})
	got, err := j.Credit(rec, []Report{
		statement("entry", 1, Line{0, 1000}, Line{1, 90}),
		statement("a", 1, Line{2, 299}, Line{3, 50}), // more than the entry took, and less
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[unitKey]uint64{{keyOf("entry"), 0}: 100, {keyOf("entry"), 1}: 90, {keyOf("a"), 2}: 299} // b stated nothing
	sum := 0
	for _, w := range got {
		for _, l := range w.Lines {
			sum++
			if want[unitKey{w.Worker, l.Part}] != l.Units {
				t.Errorf("%s part %d: %d", w.Worker, l.Part, l.Units)
			}
		}
	}
	if sum != len(want) {
		t.Errorf("%v", got)
	}
}

// Test 24: what a reporter cannot claim.
func TestReporterIsBounded(t *testing.T) {
	good := receipt(1, 100, Work{keyOf("a"), []Line{{1, 100}}})
	for name, tt := range map[string]struct {
		change func(*Job, *Report)
		want   error
	}{
		"as it is":          {func(*Job, *Report) {}, nil},
		"by the payer":      {func(_ *Job, r *Report) { r.Signer = keyOf("payer") }, nil},
		"unpaid":            {func(j *Job, _ *Report) { j.Request.State = Reserved }, ErrUnpaid},
		"credited":          {func(j *Job, _ *Report) { j.Request.State = Credit }, ErrUnpaid},
		"foreign entry":     {func(_ *Job, r *Report) { r.Signer = keyOf("eve") }, ErrForeignEntry},
		"by the worker":     {func(_ *Job, r *Report) { r.Signer = keyOf("a") }, ErrForeignEntry},
		"other request":     {func(_ *Job, r *Report) { r.Request = QuoteID{8} }, ErrOtherJob},
		"other network":     {func(_ *Job, r *Report) { r.Network = Hash{1} }, ErrOtherJob},
		"a statement":       {func(_ *Job, r *Report) { r.Role = Statement }, ErrOtherJob},
		"other tokens":      {func(j *Job, _ *Report) { j.Request.State, j.Request.Tokens = Done, 99 }, ErrOtherTokens},
		"tokens > quote":    {func(_ *Job, r *Report) { r.Tokens = 201 }, ErrTooMany},
		"rows > tokens":     {func(_ *Job, r *Report) { r.Work[0].Lines[0].Units = 101 }, ErrTooMuchWork},
		"pairs > top-k":     {func(_ *Job, r *Report) { r.Work[0] = Work{keyOf("b"), []Line{{2, 401}}} }, ErrTooMuchWork},
		"units wrap":        {func(_ *Job, r *Report) { r.Work[0].Lines[0].Units = ^uint64(0) }, ErrTooMuchWork},
		"sum > tokens":      {func(_ *Job, r *Report) { r.Work = append(r.Work, Work{keyOf("b"), []Line{{1, 1}}}) }, ErrTooMuchWork},
		"rate 1.25":         {func(_ *Job, r *Report) { r.Work[0].Lines[0].Units = 100 }, nil}, // 8/s · 1.25 · 10 s
		"rate > 1.25":       {func(j *Job, _ *Report) { j.Seconds = 9 }, ErrTooFast},
		"rate not shown":    {func(j *Job, _ *Report) { delete(j.Rates, keyOf("a")) }, ErrTooFast},
		"part that is none": {func(_ *Job, r *Report) { r.Work[0].Lines[0].Part = 4 }, ErrLines},
		"no manifest":       {func(j *Job, _ *Report) { j.Parts = nil }, ErrParts},
	} {
		j, r := testJob(t), good
		r.Work = []Work{{keyOf("a"), []Line{{1, 100}}}}
		tt.change(&j, &r)
		if _, err := j.Credit(r, []Report{statement("a", 1, Line{1, 100})}); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	foreign := statement("a", 1, Line{1, 100})
	foreign.Request = QuoteID{9}
	if _, err := testJob(t).Credit(good, []Report{foreign}); !errors.Is(err, ErrOtherJob) {
		t.Errorf("a statement of another request: %v", err)
	}
	if _, err := testJob(t).Credit(good, []Report{good}); !errors.Is(err, ErrOtherJob) {
		t.Errorf("a receipt as a statement: %v", err)
	}
}

// A stolen reporter's key takes at most ten bonds.
func TestStolenReporter(t *testing.T) {
	const bond = Amount(1000)
	taken := Amount(0)
	for range 1000 {
		if CheckReporter(taken, 77, bond) == nil {
			taken += 77
		}
	}
	if taken > 10*bond || taken < 9*bond {
		t.Errorf("%d of a bond of %d", taken, bond)
	}
	for _, tt := range []struct {
		unsettled, claim, bond Amount
		ok                     bool
	}{{0, 1, 0, false}, {0, 10, 1, true}, {^Amount(0), 1, ^Amount(0), false}, {1 << 62, 1 << 62, 1 << 62, true}} {
		if err := CheckReporter(tt.unsettled, tt.claim, tt.bond); (err == nil) != tt.ok {
			t.Errorf("%+v: %v", tt, err)
		}
	}
}

func TestTiming(t *testing.T) {
	p := DefaultParams()
	for late := range uint64(31) {
		want := TooLate
		if late <= 2 {
			want = OnTime
		} else if late <= 24 {
			want = Late
		}
		if got, err := p.Timing(100, 100+late); got != want || err != nil {
			t.Errorf("%d epochs late: %d, %v", late, got, err)
		}
	}
	if _, err := p.Timing(100, 99); !errors.Is(err, ErrPast) {
		t.Error(err)
	}
}

func TestWindow(t *testing.T) {
	p := DefaultParams()
	for settled, want := range map[uint64]uint64{0: 16, 19: 16, 20: 64, 1 << 60: 64} {
		if got := p.Window(settled); got != want {
			t.Errorf("after %d requests: %d tokens", settled, got)
		}
	}
}
