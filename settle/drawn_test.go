package settle

import "testing"

// TestDrawn: who was not drawn has its pay, and nothing of the emission; what would have
// been its part stays in the reserve.
func TestDrawn(t *testing.T) {
	p, a, b := DefaultParams(), Node{1}, Node{2}
	r := Request{Quote: Quote{ID: QuoteID{1}, PromptTokens: 10, AnswerTokens: 10, Amount: 100_000, PriceRaw: 5_000_000_000_000, Ref: 1_000_000_000},
		State: Done, Payer: Wallet{3}, Paid: 100_000, Tokens: 20}
	s := Settling{Job: Job{Request: r, Parts: []Part{{Weight: 1, PerToken: 2}}}, Timing: OnTime, Counted: true, Reserve: NewReserve(1_000_000), Bonds: map[Node]Bond{},
		Work: []Work{{a, []Line{{0, 10}}}, {b, []Line{{0, 30}}}}}
	for _, tt := range []struct {
		name  string
		drawn map[Node]bool
		want  [2]Amount
	}{
		{"nobody says", nil, [2]Amount{937, 2812}},
		{"both", map[Node]bool{a: true, b: true}, [2]Amount{937, 2812}},
		{"one", map[Node]bool{b: true}, [2]Amount{0, 2812}},
		{"none", map[Node]bool{}, [2]Amount{0, 0}},
	} {
		s.Drawn = tt.drawn
		o, err := p.SettleRequest(s)
		if err != nil {
			t.Fatal(err)
		}
		got := [2]Amount{o.Workers[0].Emission, o.Workers[1].Emission}
		if got != tt.want || o.Emitted != got[0]+got[1] || o.Reserve.Remaining != 1_000_000-o.Emitted {
			t.Errorf("%s: %d, %d emitted, want %d", tt.name, got, o.Emitted, tt.want)
		}
		if o.Workers[0].Pay != 21_250 || o.Workers[1].Pay != 63_750 {
			t.Errorf("%s: a pay of %d and %d", tt.name, o.Workers[0].Pay, o.Workers[1].Pay)
		}
	}
}
