//go:build cgo && linux && svm

package node

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/mr-tron/base58"
	"github.com/pquerna/otp/totp"

	"kvasird/node/api"
	"kvasird/node/cashier"
	"kvasird/node/client"
	"kvasird/p2p"
	"kvasird/settle"
	"kvasird/settle/settletest"
)

// town is a network with a token, a chain, who settles, and somebody with tokens.
type town struct {
	*network
	chain    *settletest.Chain
	mint     settletest.Mint
	operator settletest.Wallet
	alice    settletest.Wallet
	settings []string // of the token section
	config   string   // file of who settles
}

// devnetSpans are so short that a test sees pay become free.
var devnetSpans = []string{"epoch_seconds=60", "supply_delay_seconds=60", "ema_seconds=60", "audit_seconds=1", "unbonding_seconds=1", "claim_seconds=1"}

const aliceHas = 10_000_000

func newTown(t *testing.T) *town {
	t.Helper()
	w := &town{chain: settletest.Start(t)}
	w.operator, w.alice = w.chain.NewWallet("operator"), w.chain.NewWallet("alice")
	w.mint = w.chain.NewMint("kvr", settletest.Token)
	w.mint.Open(w.operator.Key)
	w.mint.Fund(w.alice.Key, aliceHas)
	w.chain.Advance(60)
	var genesis settle.Key
	raw := must(w.chain.Call("getGenesisHash"))(t)
	if err := json.Unmarshal(raw, &genesis); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	me := must(p2p.LoadOrCreateIdentity(filepath.Join(dir, "identity.key")))(t)
	w.settings = tokenSettings(append(devnetSpans, "mint="+w.mint.Key.String(), "cluster="+genesis.String(), "vault_owner="+w.operator.Key.String(),
		"wallets="+walletText("a"), "threshold=1", "settlement="+me.ID().String())...)
	w.network = newNetwork(t, NewNetwork{Token: w.settings, Devnet: true})
	data := filepath.Join(w.dir, "settle")
	if err := os.MkdirAll(data, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(data, "identity.key"), must(os.ReadFile(filepath.Join(dir, "identity.key")))(t), 0o600); err != nil {
		t.Fatal(err)
	}
	vault := filepath.Join(w.dir, "vault.json")
	writeKey(t, vault, w.operator.Private)
	w.config = filepath.Join(w.dir, "settle.toml")
	w.configure(fmt.Sprintf("[settle]\nrpc = [%q]\nvault_key = %q\n", w.chain.URL("a"), vault))
	return w
}

func (w *town) configure(text string) {
	w.t.Helper()
	if err := os.WriteFile(w.config, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func writeKey(t testing.TB, path string, key ed25519.PrivateKey) {
	t.Helper()
	var numbers []int
	for _, b := range key {
		numbers = append(numbers, int(b))
	}
	if err := os.WriteFile(path, must(json.Marshal(numbers))(t), 0o600); err != nil {
		t.Fatal(err)
	}
}

// ask posts a request and returns what was answered.
func (w *town) ask(body []byte, headers map[string]string) (status int, text []byte) {
	w.t.Helper()
	r := must(http.NewRequestWithContext(w.ctx, http.MethodPost, "http://"+w.http+"/v1/chat/completions", bytes.NewReader(body)))(w.t)
	r.Header.Set("Content-Type", "application/json")
	for k, v := range headers {
		r.Header.Set(k, v)
	}
	resp := must(http.DefaultClient.Do(r))(w.t)
	defer resp.Body.Close()
	return resp.StatusCode, must(io.ReadAll(resp.Body))(w.t)
}

// until asks again while the answer is 503: the settlement is not met, or the payment not
// final.
func (w *town) until(want int, body []byte, headers map[string]string) []byte {
	w.t.Helper()
	for {
		status, text := w.ask(body, headers)
		if status == want {
			return text
		}
		if status != http.StatusServiceUnavailable || w.ctx.Err() != nil {
			w.t.Fatalf("status %d, want %d: %s", status, want, text)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// becomes waits for something.
func (w *town) becomes(what string, true func() bool) {
	w.t.Helper()
	for !true() {
		if w.ctx.Err() != nil {
			w.t.Fatalf("%s: it never happens", what)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// buys pays for a request on the chain and has it answered.
func (w *town) buys(body []byte) (answer []byte, paid settle.Amount) {
	w.t.Helper()
	var bill struct {
		Payment struct {
			Quote  settle.QuoteID `json:"quote"`
			Amount settle.Amount  `json:"amount"`
			Memo   string         `json:"memo"`
			Secret string         `json:"claim_secret"`
		} `json:"payment"`
	}
	text := w.until(http.StatusPaymentRequired, body, nil)
	if err := json.Unmarshal(text, &bill); err != nil || bill.Payment.Amount == 0 {
		w.t.Fatalf("%v: %s", err, text)
	}
	p := bill.Payment
	sig := w.chain.Run([]settletest.Wallet{w.alice},
		w.mint.TransferChecked(w.mint.ATA(w.alice.Key), w.mint.ATA(w.operator.Key), w.alice.Key, p.Amount), settletest.Memo(p.Memo, w.alice.Key))
	headers := map[string]string{"X-Kvasir-Quote": p.Quote.String(), "X-Kvasir-Payment": sig.String(), "X-Kvasir-Secret": p.Secret, "X-Kvasir-Payer": w.alice.Key.String()}
	if status, text := w.ask(body, headers); status != http.StatusServiceUnavailable {
		w.t.Errorf("a payment that is not final: status %d: %s", status, text)
	}
	w.chain.Advance(40)
	return w.until(http.StatusOK, body, headers), p.Amount
}

// controlOf is the control API of a node that runs here.
func (w *town) controlOf(name string) *client.Client {
	return client.New(filepath.Join(w.dir, name+".sock"))
}

// TestPaidNetwork: somebody pays for an answer on the chain; who computed it links a wallet,
// and claims the pay to it.
func TestPaidNetwork(t *testing.T) {
	w := newTown(t)
	settles, _ := w.here("settle", "--role", "settle", "--config", w.config)
	entry, _ := w.here("entry", "--role", "backbone,entry", "--model", w.whole, "--peer", localAddr(must(settles.Status(w.ctx))(t)))
	w.serves(entry)
	body := must(json.Marshal(map[string]any{"model": "backbone", "max_tokens": 64, "temperature": 0, "messages": []map[string]string{{"role": "user", "content": questions[0]}}}))(t)
	text, paid := w.buys(body)
	if !strings.Contains(string(text), `"finish_reason":"stop"`) {
		t.Errorf("answered %s", text)
	}
	c := w.controlOf("entry")
	var m api.Money
	w.becomes("the entry is paid", func() bool {
		var err error
		m, err = c.Money(w.ctx)
		return err == nil && m.Ledger.Requests == 1
	})
	if m.Terms.Vault != w.mint.ATA(w.operator.Key).String() || m.Ledger.Earned == "0" || m.Ledger.Wallet != api.NoWallet {
		t.Errorf("%+v", m)
	}
	back := must(c.Ledger(w.ctx, w.alice.Key.String()))(t)
	t.Logf("paid %d, %s back, the entry earned %s", paid, back.Balance, m.Ledger.Earned)
	if earned, rest := amount(t, m.Ledger.Earned), amount(t, back.Balance); rest == 0 || earned+rest >= paid {
		t.Errorf("of %d %d came back and %d were earned", paid, rest, earned)
	}
	w.claims(c)
	w.refusesStrangers(entry)
	w.governs(c)
}

// governs changes a parameter, from a node that is not who settles.
func (w *town) governs(c *client.Client) {
	w.t.Helper()
	now := must(c.Money(w.ctx))(w.t).Terms
	made := must(c.Propose(w.ctx, api.Change{Values: map[string]uint64{"fee": 120_000}}))(w.t)
	wallet, key := walletOf("a")
	_, stranger := walletOf("b")
	uri := must(url.Parse(regexp.MustCompile(`otpauth://\S+`).FindString(w.said.String())))(w.t)
	code := must(totp.GenerateCode(uri.Query().Get("secret"), time.Now()))(w.t)
	if _, err := c.Activate(w.ctx, signedChange(made, wallet, stranger, code)); err == nil {
		w.t.Error("a stranger's signature changes a parameter")
	}
	if done := must(c.Activate(w.ctx, signedChange(made, wallet, key, code)))(w.t); done.Sequence != 1 || done.Epoch <= now.Epoch {
		w.t.Errorf("activated %+v in epoch %d", done, now.Epoch)
	}
	if _, err := c.Activate(w.ctx, signedChange(made, wallet, key, code)); err == nil {
		w.t.Error("a change is taken twice")
	}
}

func signedChange(made api.Proposed, wallet settle.Wallet, key ed25519.PrivateKey, code string) api.Activation {
	text := made.Texts[wallet.String()]
	return api.Activation{Proposal: made.Proposal, Code: code,
		Signatures: []api.WalletSignature{{Wallet: wallet.String(), Format: "raw", Signature: base58.Encode(ed25519.Sign(key, []byte(text)))}}}
}

// claims links a wallet to the entry and claims what it earned.
func (w *town) claims(c *client.Client) {
	w.t.Helper()
	volunteer := w.chain.NewWallet("volunteer")
	w.mint.Open(volunteer.Key)
	ask := must(c.LinkText(w.ctx, api.LinkTextRequest{Wallet: volunteer.Key.String()}))(w.t)
	l := api.Link{Wallet: volunteer.Key.String(), Since: ask.Since, Format: "raw", Signature: base58.Encode(ed25519.Sign(w.alice.Private, []byte(ask.Text)))}
	if _, err := c.Link(w.ctx, l); err == nil {
		w.t.Error("another wallet's signature links")
	}
	l.Signature = base58.Encode(ed25519.Sign(volunteer.Private, []byte(ask.Text)))
	if got := must(c.Link(w.ctx, l))(w.t); got.Wallet != volunteer.Key.String() || got.Spend {
		w.t.Errorf("linked %+v", got)
	}
	var free string
	w.becomes("pay is free", func() bool {
		l, err := c.Ledger(w.ctx, volunteer.Key.String())
		free = l.Balance
		return err == nil && free != "0"
	})
	move := api.Move{ID: strings.Repeat("ab", 32), Amount: free}
	first := must(c.Claim(w.ctx, move))(w.t)
	if again := must(c.Claim(w.ctx, move))(w.t); again.Signed.Signature != first.Signed.Signature {
		w.t.Errorf("one claim is two payouts: %+v and %+v", first, again)
	}
	w.chain.Advance(40)
	if got := w.chain.Balance(w.mint.ATA(volunteer.Key)); got != amount(w.t, free) {
		w.t.Errorf("the wallet has %d, %s were claimed", got, free)
	}
	w.becomes("the payout is done", func() bool {
		l, err := c.Ledger(w.ctx, volunteer.Key.String())
		return err == nil && len(l.Payouts) == 1 && l.Payouts[0].Outcome == 1 && l.Leaving == "0"
	})
}

// refusesStrangers sees that the HTTP door of the node's accounts takes the service token
// alone.
func (w *town) refusesStrangers(entry *Node) {
	w.t.Helper()
	secret := strings.TrimSpace(string(must(os.ReadFile(filepath.Join(w.dir, "entry", serviceTokenName)))(w.t)))
	before := must(w.controlOf("entry").Money(w.ctx))(w.t).Ledger
	for token, want := range map[string]int{"": http.StatusForbidden, secret + "a": http.StatusForbidden, secret: http.StatusOK} {
		r := must(http.NewRequest(http.MethodPost, "http://"+w.http+"/api/node/contribution", strings.NewReader(`{"units": 1000000000, "role": "hub", "tier": "gold"}`)))(w.t)
		r.Header.Set(cashier.TokenHeader, token)
		resp := must(http.DefaultClient.Do(r))(w.t)
		resp.Body.Close()
		if resp.StatusCode != want {
			w.t.Errorf("token %.8q…: status %d, want %d", token, resp.StatusCode, want)
		}
	}
	if after := must(w.controlOf("entry").Money(w.ctx))(w.t).Ledger; after.Earned != before.Earned || after.Held != before.Held || after.Bonded != before.Bonded {
		w.t.Errorf("what a node says of itself moved %+v to %+v", before, after)
	}
}

func amount(t testing.TB, s string) settle.Amount {
	t.Helper()
	return must(settle.ParseAmount(s))(t)
}

// TestSettleRefusesToStart: each thing that is not as it should be ends the start with its
// reason, and no URL.
func TestSettleRefusesToStart(t *testing.T) {
	w := newTown(t)
	good := string(must(os.ReadFile(w.config))(t))
	other := filepath.Join(w.dir, "other.json")
	writeKey(t, other, w.alice.Private)
	vault := filepath.Join(w.dir, "vault.json")
	open := filepath.Join(w.dir, "open.json")
	writeKey(t, open, w.operator.Private)
	if err := os.Chmod(open, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		config string
		fault  *settletest.Fault
		data   string
		want   string
	}{
		"another node":        {good, nil, "stranger", "as who settles, and this node is"},
		"another vault key":   {strings.Replace(good, vault, other, 1), nil, "settle", "settle.vault_key: it is the key of"},
		"a key others read":   {strings.Replace(good, vault, open, 1), nil, "settle", "chmod 600"},
		"no key":              {strings.Replace(good, vault, "none.json", 1), nil, "settle", "settle.vault_key: open none.json"},
		"vault key pays fees": {good + fmt.Sprintf("fee_key = %q\n", vault), nil, "settle", "settle.fee_key is the key of the vault's owner"},
		"no authenticator":    {good + "authenticator = \"none\"\n", nil, "settle", "settle.authenticator: open none"},
		"another cluster":     {good, &settletest.Fault{Method: "getGenesisHash", Result: json.RawMessage(`"` + walletText("x") + `"`)}, "settle", "another cluster"},
		"no vault":            {good, &settletest.Fault{Method: "getMultipleAccounts", Result: json.RawMessage(`{"value": [null, null]}`)}, "settle", "the mint is not what is pinned"},
		"no provider":         {good, &settletest.Fault{HTTP: &settletest.HTTPFault{Status: 500}}, "settle", "a provider gave no answer"},
	} {
		t.Run(name, func(t *testing.T) {
			w.configure(tt.config)
			if tt.fault != nil {
				w.chain.Fault(*tt.fault)
				defer w.chain.ClearFaults()
			}
			cfg := Config{Data: filepath.Join(w.dir, tt.data), Network: w.file, Roles: []Role{RoleSettle}, HTTP: Off,
				Listen: []string{"/ip4/127.0.0.1/tcp/0"}, Control: filepath.Join(w.dir, "refused.sock")}
			if err := ReadConfigFile(w.config, &cfg); err != nil {
				t.Fatal(err)
			}
			if err := cfg.Validate(); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
			defer cancel()
			err := Run(ctx, cfg, slog.New(slog.DiscardHandler), func(*Node) { cancel() })
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), w.chain.URL("a")) {
				t.Errorf("%v, want an error with %q and no URL", err, tt.want)
			}
		})
	}
}
