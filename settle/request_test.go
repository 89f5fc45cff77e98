package settle

import (
	"errors"
	"strings"
	"testing"
)

func goodQuote(t *testing.T) Quote {
	t.Helper()
	q, err := NewQuote(Quote{ID: QuoteID{7}, Model: "tiny", PromptTokens: 100, AnswerTokens: 100, RequestHash: Hash{1}, PriceRecord: Hash{2},
		PriceRaw: 1e12, Ref: 1e9, Entry: Node{3}, CreatedSlot: 50, Created: 1000, Expires: 1120, ClaimHash: HashSecret([]byte("s"))}, 0)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func TestQuote(t *testing.T) {
	q := goodQuote(t)
	if q.Amount != 200_000 || q.ID.Memo() != "kvr1:07000000000000000000000000000000" || !q.Opens([]byte("s")) || q.Opens([]byte("S")) || q.Opens(nil) {
		t.Errorf("%+v", q)
	}
	for tokens, want := range map[uint64]Amount{0: 0, 1: 1000, 150: 150_000, 200: 200_000, 201: 200_000} {
		if got, err := q.Used(tokens); got != want || err != nil {
			t.Errorf("%d tokens use %d, %v", tokens, got, err)
		}
	}
	small := q
	small.PriceRaw, small.Ref = 1e6, 1
	if got, err := NewQuote(small, RefRefuseAfter); err != nil || got.Amount != MinQuote {
		t.Errorf("the least quote: %d, %v", got.Amount, err)
	}
	for name, tt := range map[string]struct {
		change func(*Quote)
		want   error
	}{
		"no id":         {func(q *Quote) { q.ID = QuoteID{} }, ErrQuote},
		"no model":      {func(q *Quote) { q.Model = "" }, ErrQuote},
		"long model":    {func(q *Quote) { q.Model = strings.Repeat("m", MaxModelName+1) }, ErrQuote},
		"bad model":     {func(q *Quote) { q.Model = "\xff" }, ErrQuote},
		"no tokens":     {func(q *Quote) { q.PromptTokens, q.AnswerTokens = 0, 0 }, ErrQuote},
		"many tokens":   {func(q *Quote) { q.AnswerTokens = MaxTokens + 1 }, ErrQuote},
		"wrap":          {func(q *Quote) { q.PromptTokens, q.AnswerTokens = 1<<63, 1<<63 }, ErrQuote},
		"no price":      {func(q *Quote) { q.PriceRaw = 0 }, ErrCharge},
		"no reference":  {func(q *Quote) { q.Ref = 0 }, ErrCharge},
		"overflow":      {func(q *Quote) { q.PriceRaw, q.Ref = 1<<63, 1<<63 }, ErrCharge},
		"expired":       {func(q *Quote) { q.Expires = q.Created }, ErrQuote},
		"backwards":     {func(q *Quote) { q.Expires = q.Created - 1 }, ErrQuote},
		"long":          {func(q *Quote) { q.Expires = q.Created + MaxQuoteSeconds + 1 }, ErrQuote},
		"no request":    {func(q *Quote) { q.RequestHash = Hash{} }, ErrQuote},
		"no record":     {func(q *Quote) { q.PriceRecord = Hash{} }, ErrQuote},
		"no claim hash": {func(q *Quote) { q.ClaimHash = Hash{} }, ErrQuote},
		"no entry":      {func(q *Quote) { q.Entry = Node{} }, ErrQuote},
	} {
		bad := q
		tt.change(&bad)
		if _, err := NewQuote(bad, 0); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewQuote(q, RefRefuseAfter+1); !errors.Is(err, ErrStaleRef) {
		t.Error(err)
	}
	free := q
	free.Amount = 0 // a stored quote is checked again
	if _, err := NewRequest(free); !errors.Is(err, ErrQuote) {
		t.Error(err)
	}
}

func TestParseMemo(t *testing.T) {
	good := QuoteID{1, 0xab}.Memo()
	if id, err := ParseMemo(good); err != nil || id != (QuoteID{1, 0xab}) {
		t.Errorf("%s: %v, %v", good, id, err)
	}
	for _, bad := range []string{"", "kvr1:", good + "\n", good + "0", good[:len(good)-1], " " + good, strings.ToUpper(good),
		strings.Replace(good, "kvr1", "KVR1", 1), strings.Replace(good, "ab", "AB", 1), strings.Replace(good, "0", "\x00", 1),
		strings.Replace(good, "a", "а", 1), "kvr2" + good[4:], strings.Repeat("kvr1:", 1<<16)} {
		if id, err := ParseMemo(bad); err == nil {
			t.Errorf("%.60q is %s", bad, id)
		} else if len(err.Error()) > 400 {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
	}
}

func FuzzParseMemo(f *testing.F) {
	f.Add(QuoteID{9}.Memo())
	f.Fuzz(func(t *testing.T, s string) {
		if id, err := ParseMemo(s); err == nil && id.Memo() != s {
			t.Errorf("%q was read as %q", s, id.Memo())
		}
	})
}

var (
	goodSig     = Signature{1}
	goodPayment = Payment{goodSig, Hash{5}, QuoteID{7}.Memo(), Wallet{8}, 200_000, 60, 1100}
)

// requestIn is a request that was brought to a state by its own steps.
func requestIn(t *testing.T, s State) Request {
	t.Helper()
	r, err := NewRequest(goodQuote(t))
	step := func(next Request, e error) {
		t.Helper()
		if e != nil {
			t.Fatal(e)
		}
		r = next
	}
	step(r, err)
	if s == Open {
		return r
	}
	step(r.Reserve(goodSig, 1050, 1080))
	if s == Reserved {
		return r
	}
	step(r.Pay(goodPayment))
	if s == Paid {
		return r
	}
	step(r.Run(1110, 1200, 9))
	switch s {
	case Done:
		step(r.Finish(150))
	case Failed:
		step(r.Fail(50, "lost"))
	case Credit:
		step(r.Fail(50, "lost"))
		step(r.Credited())
	}
	return r
}

// Every step in every state: where it leads, or that it is refused and changes nothing.
func TestEveryTransition(t *testing.T) {
	late := goodPayment
	late.Time = 1121
	steps := []struct {
		name string
		do   func(Request) (Request, error)
		to   map[State]State // the states it is legal in; a repeat stays
	}{
		{"reserve", func(r Request) (Request, error) { return r.Reserve(goodSig, 1090, 1100) }, map[State]State{Open: Reserved, Reserved: Reserved}},
		{"refuse", func(r Request) (Request, error) { return r.Refuse("no memo") }, map[State]State{Reserved: Open}},
		{"pay", func(r Request) (Request, error) { return r.Pay(goodPayment) },
			map[State]State{Reserved: Paid, Paid: Paid, Running: Running, Done: Done, Failed: Failed}},
		{"late", func(r Request) (Request, error) { return r.Late(late) }, map[State]State{Reserved: Credit, Credit: Credit}},
		{"debit", func(r Request) (Request, error) { return r.Debit(Wallet{8}, 1100) }, map[State]State{Open: Paid}},
		{"run", func(r Request) (Request, error) { return r.Run(1300, 1400, 10) }, map[State]State{Paid: Running, Running: Running}},
		{"finish", func(r Request) (Request, error) { return r.Finish(150) }, map[State]State{Running: Done, Done: Done}},
		{"fail", func(r Request) (Request, error) { return r.Fail(50, "lost") }, map[State]State{Running: Failed, Failed: Failed}},
		{"fail at once", func(r Request) (Request, error) { return r.Fail(0, "busy") }, map[State]State{Paid: Failed, Running: Failed}},
		{"credited", func(r Request) (Request, error) { return r.Credited() }, map[State]State{Failed: Credit, Credit: Credit}},
	}
	for _, step := range steps {
		for s := Open; s <= Credit; s++ {
			before := requestIn(t, s)
			after, err := step.do(before)
			to, legal := step.to[s]
			switch {
			case !legal && (err == nil || after != before):
				t.Errorf("%s in %s: %s, %v", step.name, s, after.State, err)
			case legal && (err != nil || after.State != to):
				t.Errorf("%s in %s: %s, %v, want %s", step.name, s, after.State, err, to)
			case legal:
				if again, err := step.do(after); step.name != "refuse" && step.name != "debit" && step.name != "fail at once" && step.name != "run" && step.name != "reserve" && (err != nil || again != after) {
					t.Errorf("%s in %s again: %+v, %v", step.name, s, again, err)
				}
			}
		}
	}
}

func TestReserve(t *testing.T) {
	open, reserved := requestIn(t, Open), requestIn(t, Reserved)
	for _, tt := range []struct {
		r    Request
		sig  Signature
		now  uint64
		want error
	}{
		{open, goodSig, 1120, nil}, {open, goodSig, 1120 + LateSeconds, nil}, {open, goodSig, 1121 + LateSeconds, ErrExpired}, {open, Signature{}, 1100, ErrOtherPayment},
		{reserved, Signature{2}, 1100, ErrOtherPayment}, {reserved, goodSig, 1079, ErrLease}, {reserved, goodSig, 1080, nil},
		{requestIn(t, Paid), Signature{2}, 1100, ErrState},
	} {
		if _, err := tt.r.Reserve(tt.sig, tt.now, tt.now+30); !errors.Is(err, tt.want) {
			t.Errorf("%s at %d: %v", tt.r.State, tt.now, err)
		}
	}
	// A definite no frees the quote for another payment, and says why.
	again, err := reserved.Refuse("1 base unit short")
	if err != nil || again.Reason != "1 base unit short" || again.Signature != (Signature{}) {
		t.Fatal(again, err)
	}
	if _, err := again.Reserve(Signature{2}, 1100, 1130); err != nil {
		t.Error(err)
	}
}

func TestPay(t *testing.T) {
	r := requestIn(t, Reserved)
	owned := r
	owned.Quote.Owner = Wallet{9}
	for name, tt := range map[string]struct {
		r       Request
		change  func(*Payment)
		pay     error
		lateToo bool // Late takes it: the money is credited
	}{
		"exact":           {r, func(*Payment) {}, nil, false},
		"more":            {r, func(p *Payment) { p.Amount++ }, nil, false},
		"one short":       {r, func(p *Payment) { p.Amount-- }, ErrTooLittle, true},
		"after expiry":    {r, func(p *Payment) { p.Time = 1121 }, ErrExpired, true},
		"other signature": {r, func(p *Payment) { p.Signature[0]++ }, ErrOtherPayment, false},
		"other quote":     {r, func(p *Payment) { p.Memo = QuoteID{6}.Memo() }, ErrWrongMemo, false},
		"memo + newline":  {r, func(p *Payment) { p.Memo += "\n" }, ErrWrongMemo, false},
		"no payer":        {r, func(p *Payment) { p.Payer = Wallet{} }, ErrWrongPayer, false},
		"not the owner":   {owned, func(*Payment) {}, ErrWrongPayer, false},
		"older than it":   {r, func(p *Payment) { p.Slot = 49 }, ErrTooEarly, false},
	} {
		p := goodPayment
		tt.change(&p)
		paid, err := tt.r.Pay(p)
		if !errors.Is(err, tt.pay) || err == nil && (paid.State != Paid || paid.Paid != p.Amount) {
			t.Errorf("%s: %s, %v", name, paid.State, err)
		}
		late, err := tt.r.Late(p)
		if (err == nil) != tt.lateToo || err == nil && (late.State != Credit || late.Paid != p.Amount) {
			t.Errorf("%s: late is %s, %v", name, late.State, err)
		}
		if tt.pay == nil && !errors.Is(err, ErrNotLate) {
			t.Errorf("%s: late gives %v", name, err)
		}
	}
	if _, err := requestIn(t, Open).Debit(Wallet{}, 1100); !errors.Is(err, ErrWrongPayer) {
		t.Error(err)
	}
	if _, err := requestIn(t, Open).Debit(Wallet{1}, 1121); !errors.Is(err, ErrExpired) {
		t.Error(err)
	}
	owned = requestIn(t, Open)
	owned.Quote.Owner = Wallet{9}
	if _, err := owned.Debit(Wallet{1}, 1100); !errors.Is(err, ErrWrongPayer) {
		t.Error(err)
	}
	if debited, err := owned.Debit(Wallet{9}, 1100); err != nil {
		t.Error(err)
	} else if again, err := debited.Debit(Wallet{9}, 1100); err != nil || again != debited {
		t.Error("a repeated debit is another step", err)
	}
}

func TestRunAndEnd(t *testing.T) {
	running := requestIn(t, Running)
	if _, err := running.Run(1199, 1300, 9); !errors.Is(err, ErrRunning) {
		t.Error(err)
	}
	if again, err := running.Run(1200, 1300, 12); err != nil || again.Started != 9 {
		t.Errorf("after its lease it starts in epoch %d, %v", again.Started, err)
	}
	if _, err := running.Finish(201); !errors.Is(err, ErrTooMany) {
		t.Error(err)
	}
	if _, err := requestIn(t, Done).Finish(151); !errors.Is(err, ErrState) {
		t.Error(err)
	}
	for s, want := range map[State]Amount{Done: 150_000, Failed: 50_000, Credit: 50_000} {
		if used, err := requestIn(t, s).Used(); used != want || err != nil {
			t.Errorf("%s used %d, %v", s, used, err)
		}
	}
	if _, err := running.Used(); !errors.Is(err, ErrState) {
		t.Error(err)
	}
}

func TestAgain(t *testing.T) {
	for _, tt := range []struct {
		s       State
		sig     Signature
		request Hash
		opened  bool
		now     uint64
		want    error
	}{
		{Done, goodSig, Hash{1}, true, 1300, nil}, {Done, goodSig, Hash{2}, true, 1300, ErrOtherRequest}, {Done, goodSig, Hash{1}, false, 1300, ErrNotClaimed},
		{Done, Signature{2}, Hash{1}, true, 1300, ErrOtherPayment}, {Open, Signature{2}, Hash{1}, true, 1300, nil},
		{Running, goodSig, Hash{1}, true, 1199, ErrRunning}, {Running, goodSig, Hash{1}, true, 1200, nil}, {Failed, goodSig, Hash{1}, true, 1300, nil},
	} {
		if err := requestIn(t, tt.s).Again(tt.sig, tt.request, tt.opened, tt.now); !errors.Is(err, tt.want) {
			t.Errorf("%+v: %v", tt, err)
		}
	}
}
