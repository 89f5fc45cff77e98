package settle

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
)

var (
	inflow = Account{Kind: Inflow}
	alice  = Account{Balance, Key{1}}
	bob    = Account{Balance, Key{2}}
)

func entry(t testing.TB, action Action, id byte, transfers ...Transfer) Entry {
	t.Helper()
	e, err := NewEntry(action, Hash{id}, 5, transfers...)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestApply(t *testing.T) {
	l := NewLedger()
	deposit := entry(t, ActDeposit, 1, Transfer{inflow, alice, 100})
	for i, want := range []bool{true, false} {
		if posted, err := l.Apply(deposit); posted != want || err != nil {
			t.Fatalf("time %d: %v, %v", i, posted, err)
		}
	}
	escrow := EscrowOf(QuoteID{3})
	for name, tt := range map[string]struct {
		e    Entry
		want error
	}{
		"other amount, same key":         {entry(t, ActDeposit, 1, Transfer{inflow, alice, 101}), ErrKeyReused},
		"other owner, same key":          {entry(t, ActDeposit, 1, Transfer{inflow, bob, 100}), ErrKeyReused},
		"the message as a stake":         {entry(t, ActStake, 1, Transfer{inflow, Account{Bonded, Key{1}}, 100}), ErrKeyReused},
		"the message as a payment":       {entry(t, ActPayment, 1, Transfer{inflow, escrow, 100}), ErrKeyReused},
		"more than there is":             {entry(t, ActDebit, 3, Transfer{alice, escrow, 101}), ErrFunds},
		"of an empty account":            {entry(t, ActDebit, 3, Transfer{bob, escrow, 1}), ErrFunds},
		"more came in than a ledger has": {entry(t, ActDeposit, 4, Transfer{inflow, bob, noMax - 99}), ErrTotal},
	} {
		before := l.Hash()
		if posted, err := l.Apply(tt.e); posted || !errors.Is(err, tt.want) || l.Hash() != before {
			t.Errorf("%s: %v, %v", name, posted, err)
		}
	}
	if _, err := l.Apply(entry(t, ActDebit, 1, Transfer{alice, escrow, 100})); err != nil {
		t.Error(err)
	}
	if err := l.Verify(); err != nil || len(l.Accounts()) != 2 {
		t.Errorf("%v, %v", l.Accounts(), err)
	}
	l.balances[bob] = 1
	if err := l.Verify(); !errors.Is(err, ErrUnbalance) {
		t.Errorf("money from nothing: %v", err)
	}
}

// What the chain proves comes in once: a message that was credited pays no request.
func TestMessageComesInOnce(t *testing.T) {
	l := NewLedger()
	r := requestIn(t, Paid)
	r.Paid += 7
	paid, err := PaymentEntry(r, 5)
	if err != nil {
		t.Fatal(err)
	}
	credit, err := DepositEntry(Payment{Message: r.Message, Payer: r.Payer, Amount: r.Paid}, 5)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Apply(paid); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Apply(credit); !errors.Is(err, ErrKeyReused) {
		t.Errorf("credited after it paid: %v", err)
	}
	if got, _ := l.Balance(Account{Balance, r.Payer}); got != 7 {
		t.Errorf("the surplus is %d", got)
	}
	l = NewLedger()
	if _, err := l.Apply(credit); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Apply(paid); !errors.Is(err, ErrKeyReused) {
		t.Errorf("paid after it was credited: %v", err)
	}
}

// Of fifty payouts of one balance one is begun, and it ends once.
func TestPayoutOnce(t *testing.T) {
	l := NewLedger()
	if _, err := l.Apply(entry(t, ActDeposit, 1, Transfer{inflow, alice, 100})); err != nil {
		t.Fatal(err)
	}
	leaving, out, won := Account{Leaving, alice.ID}, Account{Kind: PaidOut}, 0
	for i := range byte(50) {
		posted, err := l.Apply(entry(t, ActPayout, i+1, Transfer{alice, leaving, 100}))
		if posted {
			won++
		} else if !errors.Is(err, ErrFunds) {
			t.Error(err)
		}
	}
	if won != 1 {
		t.Fatalf("%d payouts began", won)
	}
	if _, err := l.Apply(entry(t, ActPayoutFailed, 1, Transfer{leaving, alice, 100})); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Apply(entry(t, ActPayoutDone, 1, Transfer{leaving, out, 100})); !errors.Is(err, ErrKeyReused) {
		t.Errorf("a failed payout was done: %v", err)
	}
	if got, _ := l.Balance(alice); got != 100 {
		t.Errorf("after a failed payout: %d", got)
	}
}

// Every action moves money only between its kinds.
func TestFlows(t *testing.T) {
	account := func(k Kind) Account {
		if k.single() {
			return Account{Kind: k}
		}
		a := Account{Kind: k}
		a.ID[0] = byte(k)
		return a
	}
	legal := 0
	for action := ActDeposit; int(action) < len(flows); action++ {
		for from := Inflow; from <= PaidOut; from++ {
			for to := Inflow; to <= PaidOut; to++ {
				if from == to {
					continue
				}
				e, err := NewEntry(action, Hash{1}, 0, Transfer{account(from), account(to), 1})
				if err == nil {
					legal++
					if to == Inflow || from == PaidOut || to == PaidOut && from != Leaving && action != ActWithdraw || from == Inflow && e.Key().Once != ActDeposit {
						t.Errorf("%s moves from %s to %s", action, from, to)
					}
				} else if !errors.Is(err, ErrFlow) {
					t.Errorf("%s from %s to %s: %v", action, from, to, err)
				}
			}
		}
	}
	if legal != 30 {
		t.Errorf("%d flows are legal: a new one is a decision", legal)
	}
}

func TestEntryBytes(t *testing.T) {
	e := entry(t, ActDeposit, 9, Transfer{inflow, alice, 300})
	b, err := e.Encode()
	zero := strings.Repeat("00", 31)
	want := "a4" + "0101" + "025820" + "09" + zero + "0305" + "0482" + "83" + "01" + "5820" + "00" + zero + "39012b" + "83" + "02" + "5820" + "01" + zero + "19012c"
	if err != nil || hex.EncodeToString(b) != want {
		t.Errorf("%x, %v, want %s", b, err, want)
	}
	got, err := DecodeEntry(b)
	if err != nil || got.Hash() != e.Hash() || got.Time != 5 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestEntryRefused(t *testing.T) {
	good := entry(t, ActSettle, 9, Transfer{EscrowOf(QuoteID{3}), alice, 70}, Transfer{EscrowOf(QuoteID{3}), Account{Kind: Pool}, 30})
	encoded := func(change func(*Entry)) []byte { // whatever it says
		e := good
		e.Postings = append([]Posting(nil), good.Postings...)
		change(&e)
		b, err := e.marshal()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	ok := encoded(func(*Entry) {})
	if _, err := DecodeEntry(ok); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		b    []byte
		want error
	}{
		"empty":            {nil, ErrRecord},
		"cut":              {ok[:len(ok)-1], ErrRecord},
		"trailing":         {append(bytes.Clone(ok), 0), ErrRecord},
		"too long":         {make([]byte, MaxEntry+1), ErrRecord},
		"long integer":     {bytes.Replace(ok, []byte{3, 5, 4}, []byte{3, 0x18, 5, 4}, 1), ErrRecord},
		"a float":          {bytes.Replace(ok, []byte{3, 5, 4}, []byte{3, 0xf9, 0x45, 0, 4}, 1), ErrRecord},
		"no action":        {encoded(func(e *Entry) { e.Action = 0 }), ErrEntry},
		"unknown action":   {encoded(func(e *Entry) { e.Action = Action(len(flows)) }), ErrEntry},
		"no id":            {encoded(func(e *Entry) { e.ID = Hash{} }), ErrEntry},
		"no postings":      {encoded(func(e *Entry) { e.Postings = nil }), ErrEntry},
		"one posting":      {encoded(func(e *Entry) { e.Postings = e.Postings[:1] }), ErrEntry},
		"many postings":    {encoded(func(e *Entry) { e.Postings = make([]Posting, MaxPostings+1) }), ErrEntry},
		"unbalanced":       {encoded(func(e *Entry) { e.Postings[0].Delta++ }), ErrUnbalance},
		"nothing":          {encoded(func(e *Entry) { e.Postings[0].Delta = 0 }), ErrEntry},
		"too much":         {encoded(func(e *Entry) { e.Postings[0].Delta = noMax + 1 }), ErrEntry},
		"least":            {encoded(func(e *Entry) { e.Postings[1].Delta = -1 << 63 }), ErrEntry},
		"order":            {encoded(func(e *Entry) { e.Postings[0], e.Postings[1] = e.Postings[1], e.Postings[0] }), ErrEntry},
		"account twice":    {encoded(func(e *Entry) { e.Postings[1] = e.Postings[0] }), ErrEntry},
		"unknown kind":     {encoded(func(e *Entry) { e.Postings[2].Account.Kind = PaidOut + 1 }), ErrEntry},
		"pool with owner":  {encoded(func(e *Entry) { e.Postings[2].Account.ID = Key{1} }), ErrEntry},
		"nobody's balance": {encoded(func(e *Entry) { e.Postings[0].Account.ID = Key{} }), ErrEntry},
		"escrow of a key":  {encoded(func(e *Entry) { e.Postings[1].Account.ID[31] = 1 }), ErrEntry},
		"wrong way":        {encoded(func(e *Entry) { e.Action = ActDebit }), ErrFlow},
	} {
		if _, err := DecodeEntry(tt.b); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if _, err := NewEntry(ActDeposit, Hash{1}, 0, Transfer{inflow, alice, noMax}, Transfer{inflow, alice, 1}); !errors.Is(err, ErrEntry) {
		t.Errorf("transfers that wrap: %v", err)
	}
}

func FuzzDecodeEntry(f *testing.F) {
	for _, e := range []Entry{entry(f, ActDeposit, 1, Transfer{inflow, alice, 100}),
		entry(f, ActSettle, 2, Transfer{EscrowOf(QuoteID{3}), alice, 70}, Transfer{EscrowOf(QuoteID{3}), Account{Kind: Pool}, 30})} {
		b, err := e.Encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := DecodeEntry(b)
		if err != nil {
			return
		}
		if again, err := e.Encode(); err != nil || !bytes.Equal(again, b) {
			t.Errorf("%x is encoded as %x, %v", b, again, err)
		}
		var sum int64
		for _, p := range e.Postings {
			sum += p.Delta
		}
		if sum != 0 {
			t.Errorf("%x sums to %d", b, sum)
		}
	})
}
