package settle

import (
	"crypto/ed25519"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
)

// world is a settlement in memory, played by tests: the parameters, the ledger with its
// journal, and the records that go with it.
type world struct {
	t        testing.TB
	p        Params
	ledger   *Ledger
	journal  [][]byte
	reserve  Reserve
	requests map[string]Request
	outcomes map[string]Outcome
	bonds    map[Node]Bond
	premiums map[Wallet]Premiums
	claimed  map[string]bool
	paidIn   map[string]uint64 // the epoch
	claims   []worldClaim
	now      uint64
	slot     uint64
	serial   byte
	names    map[Key]string
	nonce    uint64
}

type worldClaim struct {
	quote  string
	amount Amount
}

var testNetwork = Hash{42}

// worldParts are the embedding, one layer with 4 experts used per token, and the head.
var worldParts = []Part{{10, 1}, {30, 1}, {50, 4}, {10, 1}}

func newWorld(t testing.TB) *world {
	return &world{t: t, p: DefaultParams(), ledger: NewLedger(), reserve: NewReserve(0), requests: map[string]Request{},
		outcomes: map[string]Outcome{}, bonds: map[Node]Bond{}, premiums: map[Wallet]Premiums{}, claimed: map[string]bool{}, paidIn: map[string]uint64{},
		now: 1_800_000_000, slot: 1000, names: map[Key]string{}}
}

func seedOf(name string) ed25519.PrivateKey {
	h := sha256.Sum256([]byte(name))
	return ed25519.NewKeyFromSeed(h[:])
}

func keyOf(name string) Key { return Key(seedOf(name).Public().(ed25519.PublicKey)) }

func (w *world) key(name string) Key {
	k := keyOf(name)
	w.names[k] = name
	return k
}

// hash is a new one for each call: of a message, or of a decision.
func (w *world) hash() Hash {
	w.nonce++
	return sha256.Sum256(fmt.Append(nil, w.nonce))
}

func (w *world) epoch() uint64 { return w.now / w.p.EpochSeconds }
func (w *world) day() uint64   { return w.now / Day }

// post applies an entry twice, as a retry would, and journals it once.
func (w *world) post(e Entry, err error) (string, error) {
	w.t.Helper()
	if err != nil {
		return "", err
	}
	b, err := e.Encode()
	if err != nil {
		w.t.Fatalf("encode: %v", err)
	}
	if posted, err := w.ledger.Apply(e); err != nil {
		return "", err
	} else if !posted {
		w.t.Fatalf("entry %s %x was there", e.Action, e.ID)
	}
	w.journal = append(w.journal, b)
	e.Time++
	if posted, err := w.ledger.Apply(e); posted || err != nil {
		w.t.Fatalf("a retry of %s was posted, or refused: %v", e.Action, err)
	}
	if err := w.ledger.Verify(); err != nil {
		w.t.Fatal(err)
	}
	var s strings.Builder
	fmt.Fprintln(&s, e.Action)
	for _, p := range e.Postings {
		fmt.Fprintf(&s, "  %-28s %+d\n", w.account(p.Account), p.Delta)
	}
	return s.String(), nil
}

func (w *world) account(a Account) string {
	if name, ok := w.names[a.ID]; ok && !a.Kind.single() {
		return a.Kind.String() + " " + name
	}
	if a.Kind == Escrow {
		for name, r := range w.requests {
			if EscrowOf(r.Quote.ID) == a {
				return "escrow " + name
			}
		}
	}
	return a.String()
}

func (w *world) move(action Action, transfers ...Transfer) (string, error) {
	return w.post(NewEntry(action, w.hash(), w.now, transfers...))
}

func (w *world) quote(name string, prompt, answer uint64) (string, error) {
	w.serial++
	q, err := NewQuote(Quote{ID: QuoteID{w.serial}, Model: "tiny", PromptTokens: prompt, AnswerTokens: answer, RequestHash: Hash{1},
		PriceRecord: Hash{2}, PriceRaw: w.p.FloorRaw, Ref: w.p.Ref, Entry: w.key("entry"), CreatedSlot: w.slot, Created: w.now, Expires: w.now + 120, ClaimHash: HashSecret([]byte(name))}, 0)
	if err != nil {
		return "", err
	}
	r, err := NewRequest(q)
	w.requests[name] = r
	return fmt.Sprintf("%s: %d base units for %d tokens\n", q.ID.Memo(), q.Amount, prompt+answer), err
}

func (w *world) pay(name, payer string, amount Amount) (string, error) {
	sig := Signature{w.serial, byte(w.slot)}
	r, err := w.requests[name].Reserve(sig, w.now, w.now+30)
	if err != nil {
		return "", err
	}
	p := Payment{sig, w.hash(), r.Quote.ID.Memo(), w.key(payer), amount, w.slot, w.now}
	paid, err := r.Pay(p)
	if err != nil {
		if paid, err = r.Late(p); err != nil {
			return "", err
		}
	}
	w.requests[name] = paid
	return w.post(PaymentEntry(paid, w.now))
}

func (w *world) debit(name, owner string) (string, error) {
	r, err := w.requests[name].Debit(w.key(owner), w.now)
	if err != nil {
		return "", err
	}
	out, err := w.post(DebitEntry(r, w.now))
	if err == nil {
		w.requests[name] = r
	}
	return out, err
}

// settle ends a request: work is what each node did of the one expert layer in percent;
// the entry node did the rest.
func (w *world) settle(name string, tokens uint64, work map[string]uint64, counted, failed bool, epochsLater uint64) (string, error) {
	r, err := w.requests[name].Run(w.now, w.now+60, w.epoch())
	if err != nil {
		return "", err
	}
	receipt := Report{Role: Receipt, Network: testNetwork, Request: r.Quote.ID, Signer: w.key("entry"), Seq: 1, Tokens: tokens}
	var statements []Report
	rates := map[Node]uint64{}
	add := func(node string, lines ...Line) {
		one := Work{w.key(node), lines}
		rates[one.Worker] = 1e9
		receipt.Work = append(receipt.Work, one)
		s := Report{Role: Statement, Network: testNetwork, Request: r.Quote.ID, Signer: one.Worker, Seq: 1, Work: []Work{one}}
		statements = append(statements, w.overTheWire(s, node))
	}
	if tokens > 0 {
		add("entry", Line{0, tokens}, Line{1, tokens}, Line{3, tokens})
		for node, percent := range work {
			if units := tokens * 4 * percent / 100; units > 0 {
				add(node, Line{2, units})
			}
		}
	}
	sortWork(receipt.Work)
	job := Job{testNetwork, r, worldParts, 10, rates}
	credited, err := job.Credit(w.overTheWire(receipt, "entry"), statements)
	if err != nil {
		return "", err
	}
	if failed {
		r, err = r.Fail(tokens, "worker lost")
	} else {
		r, err = r.Finish(tokens)
	}
	if err != nil {
		return "", err
	}
	job.Request = r
	timing, err := w.p.Timing(r.Started, w.epoch()+epochsLater)
	if err != nil {
		return "", err
	}
	o, err := w.p.SettleRequest(Settling{Job: job, Work: credited, Timing: timing, Counted: counted, Reserve: w.reserve, Bonds: w.bonds, Now: w.now, Epoch: w.epoch()})
	if err != nil {
		return "", err
	}
	var s strings.Builder
	for _, e := range o.Entries {
		line, err := w.post(e, nil)
		if err != nil {
			return "", err
		}
		s.WriteString(line)
	}
	for _, wp := range o.Workers {
		w.bonds[wp.Worker] = wp.Bond
	}
	if w.premiums[r.Payer], err = w.premiums[r.Payer].Pay(w.day(), o.Split.Insurance); err != nil {
		return "", err
	}
	w.reserve, w.outcomes[name], w.requests[name], w.paidIn[name] = o.Reserve, o, r, w.epoch()
	return s.String(), nil
}

func (w *world) overTheWire(r Report, signer string) Report {
	w.t.Helper()
	b, err := r.Sign(seedOf(signer))
	if err != nil {
		w.t.Fatal(err)
	}
	got, err := ParseReport(b)
	if err != nil {
		w.t.Fatal(err)
	}
	return got
}

func (w *world) vest(node string) (string, error) {
	b, vested := w.bonds[w.key(node)].Vest(w.now)
	w.bonds[w.key(node)] = b
	if vested == 0 {
		return "nothing\n", nil
	}
	return w.move(ActVest, Transfer{Account{Held, w.key(node)}, Account{Balance, w.key(node)}, vested})
}

func (w *world) unbond(node string, amount Amount) (string, error) {
	b, err := w.p.Unbond(w.bonds[w.key(node)], amount, w.now)
	if err != nil {
		return "", err
	}
	w.bonds[w.key(node)] = b
	return w.move(ActUnbond, Transfer{Account{Bonded, w.key(node)}, Account{Unbonding, w.key(node)}, amount})
}

func (w *world) unbonded(node string) (string, error) {
	b, out := w.bonds[w.key(node)].Unbonded(w.now)
	w.bonds[w.key(node)] = b
	if out == 0 {
		return "nothing\n", nil
	}
	return w.move(ActUnbondDone, Transfer{Account{Unbonding, w.key(node)}, Account{Balance, w.key(node)}, out})
}

func (w *world) stake(node string, amount Amount) (string, error) {
	b, err := w.bonds[w.key(node)].Stake(amount)
	if err != nil {
		return "", err
	}
	w.bonds[w.key(node)] = b
	return w.move(ActStake, Transfer{Account{Kind: Inflow}, Account{Bonded, w.key(node)}, amount})
}

func (w *world) slash(node, name, reporter string) (string, error) {
	var reward Amount
	for _, wp := range w.outcomes[name].Workers {
		if wp.Worker == w.key(node) {
			reward = wp.Pay + wp.Emission
		}
	}
	r := w.requests[name]
	used, err := r.Used()
	if err != nil {
		return "", err
	}
	b, s := w.p.Penalise(w.bonds[w.key(node)], w.paidIn[name], reward, used)
	if s.Total() == 0 {
		return "nothing\n", nil
	}
	w.bonds[w.key(node)] = b
	return w.post(SlashEntry(r.Quote.ID, w.key(node), s, used, r.Payer, w.key(reporter), w.now))
}

func (w *world) claim(name, wallet string, amount Amount) (string, error) {
	o, r := w.outcomes[name], w.requests[name]
	used, err := r.Used()
	if err != nil {
		return "", err
	}
	in := Insured{r.Payer, used, o.Split.Fee, w.now, w.claimed[name], r.State == Done, 0}
	if err := w.p.CheckClaim(in, w.key(wallet), amount, w.now); err != nil {
		return "", err
	}
	p, err := w.premiums[r.Payer].Claim(w.day(), w.p.ClaimsPPM, amount)
	if err != nil {
		return "", err
	}
	w.premiums[r.Payer], w.claimed[name] = p, true
	w.claims = append(w.claims, worldClaim{name, amount})
	return "accepted\n", nil
}

// poolEpoch pays the claims of an epoch.
func (w *world) poolEpoch() (string, error) {
	pool, _ := w.ledger.Balance(Account{Kind: Pool})
	var asked []Amount
	for _, c := range w.claims {
		asked = append(asked, c.amount)
	}
	paid, err := w.p.PayClaims(pool, asked)
	if err != nil {
		return "", err
	}
	var s strings.Builder
	for i, c := range w.claims {
		if paid[i] == 0 {
			continue
		}
		line, err := w.move(ActClaim, Transfer{Account{Kind: Pool}, Account{Balance, w.requests[c.quote].Payer}, paid[i]})
		if err != nil {
			return "", err
		}
		s.WriteString(line)
	}
	w.claims = nil
	return s.String(), nil
}

// payout is the intent, and its end.
func (w *world) payout(owner string, amount Amount, ok bool) (string, error) {
	id, k := w.hash(), w.key(owner)
	begun, err := w.post(NewEntry(ActPayout, id, w.now, Transfer{Account{Balance, k}, Account{Leaving, k}, amount}))
	if err != nil {
		return "", err
	}
	done := func(ok bool) (Entry, error) {
		if ok {
			return NewEntry(ActPayoutDone, id, w.now, Transfer{Account{Leaving, k}, Account{Kind: PaidOut}, amount})
		}
		return NewEntry(ActPayoutFailed, id, w.now, Transfer{Account{Leaving, k}, Account{Balance, k}, amount})
	}
	ended, err := w.post(done(ok))
	if err != nil {
		return "", err
	}
	other, err := done(!ok)
	if err != nil {
		return "", err
	}
	if posted, err := w.ledger.Apply(other); posted || err == nil {
		w.t.Fatal("a payout both succeeded and failed")
	}
	return begun + ended, nil
}

// check compares the records with the ledger, and the ledger with its journal.
func (w *world) check() {
	w.t.Helper()
	for node, b := range w.bonds {
		for kind, want := range map[Kind]Amount{Bonded: b.Bonded, Held: total(b.Vesting), Unbonding: total(b.Unbonding)} {
			if got, _ := w.ledger.Balance(Account{kind, node}); got != want {
				w.t.Fatalf("%s of %s: the ledger has %d, the bond %d", kind, w.names[node], got, want)
			}
		}
	}
	if got, _ := w.ledger.Balance(Account{Kind: Emission}); got != w.reserve.Remaining {
		w.t.Fatalf("emission: the ledger has %d, the reserve %d", got, w.reserve.Remaining)
	}
	again := NewLedger()
	for _, b := range w.journal {
		e, err := DecodeEntry(b)
		if err != nil {
			w.t.Fatal(err)
		}
		if posted, err := again.Apply(e); err != nil || !posted {
			w.t.Fatalf("replay of %s: %v, %v", e.Action, posted, err)
		}
	}
	if again.Hash() != w.ledger.Hash() {
		w.t.Fatal("the journal replays to another state")
	}
}

func total(list []Pending) (sum Amount) {
	for _, p := range list {
		sum += p.Amount
	}
	return sum
}
