//go:build svm && cgo && linux

package node

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/mr-tron/base58"

	"kvasird/ggml/tiny"
	"kvasird/node/api"
	"kvasird/node/cashier"
	"kvasird/node/pay"
	"kvasird/p2p"
	"kvasird/settle"
	"kvasird/settle/settletest"
)

const (
	// paidSlot is the chain's pace: a transaction is final after 32 slots.
	paidSlot = 400 * time.Millisecond
	// paidTime bounds the test: each of its payments waits for that.
	paidTime = 5 * time.Minute
	// pocket is what each consumer has in the beginning, in base units.
	pocket settle.Amount = 10_000_000
)

// paidSwarm is a network with a token on a local chain: one node settles, one answers by
// the experts of two volunteers. People have wallets, and nodes are linked to them.
type paidSwarm struct {
	*network
	chain *settletest.Chain
	mint  settletest.Mint

	operator, fees, alice, bella, dora, vera, vito settletest.Wallet
	settler                                        *child
	volunteers                                     []*child
}

func newPaidSwarm(t *testing.T) *paidSwarm {
	t.Helper()
	p := &paidSwarm{chain: settletest.StartTicking(t, paidSlot)}
	for name, w := range map[string]*settletest.Wallet{"operator": &p.operator, "fees": &p.fees, "alice": &p.alice, "bella": &p.bella,
		"dora": &p.dora, "vera": &p.vera, "vito": &p.vito} {
		*w = p.chain.NewWallet(name)
	}
	p.mint = p.chain.NewMint("kvr", settletest.Token)
	p.mint.Open(p.operator.Key)
	for _, w := range []settletest.Wallet{p.alice, p.bella} {
		p.mint.Fund(w.Key, pocket)
	}
	for _, w := range []settletest.Wallet{p.dora, p.vera, p.vito} {
		p.mint.Open(w.Key)
	}
	p.network = &network{swarm: newSwarm(t)}
	ctx, cancel := context.WithTimeout(context.Background(), paidTime)
	t.Cleanup(cancel)
	p.ctx = ctx
	p.found()
	return p
}

// found makes the files of the network and of who settles.
func (p *paidSwarm) found() {
	p.t.Helper()
	data := filepath.Join(p.dir, "settler")
	if err := os.MkdirAll(data, 0o700); err != nil {
		p.t.Fatal(err)
	}
	if _, err := p2p.LoadOrCreateIdentity(filepath.Join(data, "identity.key")); err != nil {
		p.t.Fatal(err)
	}
	var cluster settle.Key
	raw, err := p.chain.Call("getGenesisHash")
	if err == nil {
		err = json.Unmarshal(raw, &cluster)
	}
	if err != nil {
		p.t.Fatal(err)
	}
	p.file = filepath.Join(p.dir, "paid.toml")
	err = CreateNetwork(NewNetwork{Name: "paid", Replicas: 1, Out: p.file, Devnet: true, Data: data, Token: []string{
		"mint=" + p.mint.Key.String(), "decimals=" + strconv.Itoa(int(p.mint.Decimals)), "cluster=" + cluster.String(),
		"vault_owner=" + p.operator.Key.String(), "wallets=" + p.operator.Key.String(), "first_price=1000000000000", "audit_seconds=1", "bond_epochs=2",
	}}, io.Discard)
	if err != nil {
		p.t.Fatal(err)
	}
	vault, fee := p.keyFile("vault.json", p.operator), p.keyFile("fee.json", p.fees)
	config := fmt.Sprintf("[settle]\nrpc = [%q, %q]\nvault_key = %q\nfee_key = %q\n", p.chain.URL("one"), p.chain.URL("two"), vault, fee)
	if err := os.WriteFile(filepath.Join(p.dir, "settle.toml"), []byte(config), 0o600); err != nil {
		p.t.Fatal(err)
	}
}

// keyFile writes a key pair as Solana's tools do.
func (p *paidSwarm) keyFile(name string, w settletest.Wallet) string {
	p.t.Helper()
	numbers := make([]int, len(w.Private))
	for i, b := range w.Private {
		numbers[i] = int(b)
	}
	path := filepath.Join(p.dir, name)
	text, err := json.Marshal(numbers)
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		p.t.Fatal(err)
	}
	return path
}

// begin starts the nodes and links those that earn.
func (p *paidSwarm) begin() {
	p.t.Helper()
	p.settler = p.start("settler", "--config", filepath.Join(p.dir, "settle.toml"), "--network", p.file, "--role", "settle",
		"--listen", "/ip4/127.0.0.1/tcp/0", "--http", Off)
	at := localAddr(p.sees(p.settler, func(st *api.Status) bool { return st.State == api.StateServing }))
	p.backbone = p.join("backbone", "--peer", at, "--model", p.whole, "--experts", "remote", "--wait", "60")
	whole := localAddr(p.sees(p.backbone, func(st *api.Status) bool { return localAddr(st) != "" }))
	for _, name := range []string{"volunteer-1", "volunteer-2"} {
		p.volunteers = append(p.volunteers, p.join(name, "--peer", at, "--peer", whole, "--memory", "9MB", "--disk", "1GB", "--http", Off))
	}
	p.http = p.sees(p.backbone, serving).HTTP
	p.link(p.backbone, p.dora, false)
	p.link(p.volunteers[0], p.vera, false)
	p.link(p.volunteers[1], p.vito, false)
}

// link has a wallet sign that it has the pay of a node.
func (p *paidSwarm) link(c *child, w settletest.Wallet, spend bool) {
	p.t.Helper()
	text, err := c.client().LinkText(p.ctx, api.LinkTextRequest{Wallet: w.Key.String(), Spend: spend})
	if err == nil {
		_, err = c.client().Link(p.ctx, api.Link{Wallet: w.Key.String(), Spend: spend, Since: text.Since, Format: "raw",
			Signature: base58.Encode(ed25519.Sign(w.Private, []byte(text.Text)))})
	}
	if err != nil {
		p.t.Fatalf("link %s: %v", c.name, err)
	}
}

// asks posts a request with headers.
func (p *paidSwarm) asks(body []byte, headers map[string]string) (status int, retry bool, answer []byte) {
	p.t.Helper()
	req, err := http.NewRequestWithContext(p.ctx, http.MethodPost, "http://"+p.http+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	for k, v := range headers {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(resp.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	return resp.StatusCode, resp.Header.Get("Retry-After") != "", answer
}

func (p *paidSwarm) question(text string) []byte {
	req := long(text)
	req["model"] = strings.TrimSuffix(tiny.Name, ".gguf")
	delete(req, "logit_bias")
	body, err := json.Marshal(req)
	if err != nil {
		p.t.Fatal(err)
	}
	return body
}

// content is the text of a whole answer, with what it used.
func (p *paidSwarm) content(status int, body []byte) (text string, tokens uint64) {
	p.t.Helper()
	var whole struct {
		Choices []struct{ Message struct{ Content string } }
		Usage   struct {
			Total uint64 `json:"total_tokens"`
		}
	}
	if err := json.Unmarshal(body, &whole); status != http.StatusOK || err != nil || len(whole.Choices) != 1 {
		p.t.Fatalf("status %d, %v: %s", status, err, body)
	}
	return whole.Choices[0].Message.Content, whole.Usage.Total
}

// transfer sends tokens to the vault; the memo may be empty.
func (p *paidSwarm) transfer(from settletest.Wallet, amount settle.Amount, memo string) settle.Signature {
	p.t.Helper()
	in := []settletest.Instruction{p.mint.TransferChecked(p.mint.ATA(from.Key), p.mint.ATA(p.operator.Key), from.Key, amount)}
	if memo != "" {
		in = append(in, settletest.Memo(memo, from.Key))
	}
	return p.chain.Run([]settletest.Wallet{from}, in...)
}

// pays is a consumer with a wallet: it asks, is told the price, pays, and is answered.
func (p *paidSwarm) pays(w settletest.Wallet, text string) (answer string, tokens uint64, quoted settle.Amount) {
	p.t.Helper()
	body := p.question(text)
	status, _, got := p.asks(body, nil)
	var due struct{ Payment pay.Offer }
	if err := json.Unmarshal(got, &due); status != http.StatusPaymentRequired || err != nil {
		p.t.Fatalf("unpaid: status %d, %v: %s", status, err, got)
	}
	o := due.Payment
	sig := p.transfer(w, o.Amount, o.Memo)
	headers := map[string]string{"X-Kvasir-Quote": o.Quote.String(), "X-Kvasir-Payment": sig.String(), "X-Kvasir-Secret": o.ClaimSecret, "X-Kvasir-Payer": w.Key.String()}
	for {
		status, retry, got := p.asks(body, headers)
		if status == http.StatusOK || !retry {
			answer, tokens = p.content(status, got)
			return answer, tokens, o.Amount
		}
		time.Sleep(time.Second)
	}
}

// ledger is what an owner has, by the settlement.
func (p *paidSwarm) ledger(owner string) api.Ledger {
	p.t.Helper()
	l, err := p.backbone.client().Ledger(p.ctx, owner)
	if err != nil {
		p.t.Fatal(err)
	}
	return l
}

func (p *paidSwarm) amount(text string) settle.Amount {
	p.t.Helper()
	a, err := settle.ParseAmount(text)
	if err != nil {
		p.t.Fatal(err)
	}
	return a
}

// node is the key by which a node is paid.
func (p *paidSwarm) node(c *child) string {
	p.t.Helper()
	m, err := c.client().Money(p.ctx)
	if err != nil {
		p.t.Fatal(err)
	}
	return m.Ledger.Owner
}

// claims pays all that a node's wallet has to it, and waits until the chain has it.
func (p *paidSwarm) claims(c *child, w settletest.Wallet) settle.Amount {
	p.t.Helper()
	var balance settle.Amount
	for balance < settle.MinQuote || p.amount(p.ledger(p.node(c)).Held) > 0 { // until the audit window of the last pay is over
		if p.ctx.Err() != nil {
			p.t.Fatalf("%s has nothing to claim: %+v", c.name, p.ledger(w.Key.String()))
		}
		time.Sleep(time.Second)
		balance = p.amount(p.ledger(w.Key.String()).Balance)
	}
	var id [32]byte
	rand.Read(id[:])
	before := p.chain.Balance(p.mint.ATA(w.Key))
	if _, err := c.client().Claim(p.ctx, api.Move{ID: hex.EncodeToString(id[:]), Amount: balance.String()}); err != nil {
		p.t.Fatalf("%s claims: %v", c.name, err)
	}
	for p.amount(p.ledger(w.Key.String()).Leaving) > 0 || p.chain.Balance(p.mint.ATA(w.Key)) != before+balance {
		if p.ctx.Err() != nil {
			p.t.Fatalf("%s: the payout of %d does not arrive: %+v", c.name, balance, p.ledger(w.Key.String()))
		}
		time.Sleep(time.Second)
	}
	return balance
}

// holdings are the tokens of everybody, on the chain.
func (p *paidSwarm) holdings() map[string]settle.Amount {
	out := map[string]settle.Amount{}
	for name, w := range map[string]settletest.Wallet{"alice, pays each answer": p.alice, "bella, deposits once": p.bella, "dora, has the backbone": p.dora,
		"vera, has volunteer 1": p.vera, "vito, has volunteer 2": p.vito, "vault": p.operator} {
		out[name] = p.chain.Balance(p.mint.ATA(w.Key))
	}
	return out
}

// TestPaidSwarm is the whole way of money: consumers pay, workers are credited what they
// computed, claim it, and every token is where the books say.
func TestPaidSwarm(t *testing.T) {
	p := newPaidSwarm(t)
	p.begin()
	before := p.holdings()
	const france, volunteer = "What is the capital of France?", "What does a worker hold?"

	text, tokens, quoted := p.pays(p.alice, france)
	if want := reference().answer(t, france, false); text != want {
		t.Errorf("got %q, want %q", text, want)
	}
	fmt.Printf("alice      was quoted %d base units at most, and got %d tokens: %q\n", quoted, tokens, text)

	const deposit settle.Amount = 1_000_000
	sig := p.transfer(p.bella, deposit, "")
	entry := p.join("bella", "--peer", localAddr(p.sees(p.backbone, serving)), "--role", "entry")
	p.http = p.sees(entry, func(st *api.Status) bool { return st.HTTP != "" }).HTTP
	p.link(entry, p.bella, true)
	for {
		_, err := entry.client().Deposit(p.ctx, api.Deposit{Signature: sig.String(), Owner: p.bella.Key.String(), Amount: deposit.String()})
		if err == nil {
			break
		}
		if p.ctx.Err() != nil {
			t.Fatalf("deposit: %v", err)
		}
		time.Sleep(time.Second)
	}
	fmt.Printf("bella      deposited %d\n", deposit)
	p.isReady(entry)
	for _, q := range []string{volunteer, "What is 6 plus 7?"} {
		status, _, got := p.asks(p.question(q), nil)
		text, tokens := p.content(status, got)
		if want := reference().answer(t, q, false); text != want {
			t.Errorf("got %q, want %q", text, want)
		}
		fmt.Printf("bella      got %d tokens from her balance: %q\n", tokens, text)
	}

	for _, c := range append(p.volunteers, p.backbone) { // two of the requests were carried
		for p.ledger(p.node(c)).Requests < 3 {
			if p.ctx.Err() != nil {
				t.Fatalf("%s was not paid for three requests: %+v", c.name, p.ledger(p.node(c)))
			}
			time.Sleep(time.Second)
		}
	}
	for _, who := range []struct {
		c *child
		w settletest.Wallet
	}{{p.volunteers[0], p.vera}, {p.volunteers[1], p.vito}, {p.backbone, p.dora}} {
		got := p.claims(who.c, who.w)
		st, err := who.c.client().Money(p.ctx)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Printf("%-10s earned %s for %d requests, claimed %d, %s stay bonded\n", who.c.name, st.Ledger.Earned, st.Ledger.Requests, got, st.Ledger.Bonded)
	}
	p.audit(before)
}

// audit compares the chain with the books, once who settles has stopped.
func (p *paidSwarm) audit(before map[string]settle.Amount) {
	p.t.Helper()
	after := p.holdings()
	var sum settle.Amount
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\ntokens on the chain\tbefore\tafter\tchange\t")
	for _, name := range []string{"alice, pays each answer", "bella, deposits once", "dora, has the backbone", "vera, has volunteer 1", "vito, has volunteer 2", "vault"} {
		fmt.Fprintf(w, "%s\t%d\t%d\t%+d\t\n", name, before[name], after[name], int64(after[name])-int64(before[name]))
		sum += after[name]
	}
	w.Flush()
	if sum != 2*pocket {
		p.t.Errorf("%d tokens are there, %d were made", sum, 2*pocket)
	}
	if err := p.settler.stop(); err != nil {
		p.t.Fatal(err)
	}
	books, err := cashier.Open(filepath.Join(p.dir, "settler", "books"), slog.New(slog.DiscardHandler), nil)
	if err != nil {
		p.t.Fatal(err)
	}
	defer books.Close()
	ledger, err := books.Verify()
	if err != nil {
		p.t.Fatal(err)
	}
	in, _ := ledger.Balance(settle.Account{Kind: settle.Inflow})
	out, _ := ledger.Balance(settle.Account{Kind: settle.PaidOut})
	if in-out != after["vault"] {
		p.t.Errorf("the books have %d in and %d out, the vault has %d", in, out, after["vault"])
	}
	fmt.Printf("\nthe books: %d came in, %d was paid out, the vault holds the difference; in it are\n", in, out)
	held := map[settle.Kind]settle.Amount{}
	for _, a := range ledger.Accounts() {
		if a.Account.Kind != settle.Inflow && a.Account.Kind != settle.PaidOut {
			held[a.Account.Kind] += a.Amount
		}
	}
	for k := settle.Balance; k <= settle.Emission; k++ {
		if held[k] > 0 {
			fmt.Printf("  %10d  %s\n", held[k], k)
		}
	}
	if held[settle.Escrow] != 0 {
		p.t.Errorf("%d are in escrow of requests that ended", held[settle.Escrow])
	}
}
