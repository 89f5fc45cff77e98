package fetch

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// Whatever each source gives a second, all are done at about the same time. The servers take
// turns of a sixteenth of a second, by which an end may be late.
func TestSourcesEndTogether(t *testing.T) {
	m := makeModel(1, 32*mib)
	const turn = time.Second / stepsPerSecond
	for _, test := range []struct {
		rates []int64 // MiB/s, 32 of all
		late  time.Duration
	}{
		{[]int64{8, 8, 8, 8}, turn / 2}, {[]int64{4, 4, 4, 20}, turn / 2},
		{[]int64{12, 20}, turn + turn/2}, {[]int64{4, 8, 8, 12}, 2*turn + turn/2},
	} {
		t.Run(fmt.Sprint(test.rates), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var sources []Source
				for i, rate := range test.rates {
					sources = append(sources, honest(fmt.Sprint(i), ServerConfig{Library: m, Rate: rate * mib}))
				}
				start := time.Now()
				sink := newJudge(t, m)
				if err := NewClient(ClientConfig{}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: these(sources...)}); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(start); took > time.Second+test.late {
					t.Errorf("32 MiB at 32 MiB/s took %v, want 1s and at most %v more", took, test.late)
				}
				sink.check(nil)
			})
		})
	}
}
