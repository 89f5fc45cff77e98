package main

import (
	"crypto/ed25519"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/mr-tron/base58"

	"kvasird/node/api"
)

// bank is a daemon of a network with a token, which keeps what it was asked.
type bank struct {
	asked map[string]json.RawMessage // by path
	money api.Money
	reply map[string]any
}

func newBank(t *testing.T) (*bank, string) {
	b := &bank{asked: map[string]json.RawMessage{}, reply: map[string]any{}}
	b.money.Terms = api.MoneyTerms{Mint: "Mint", Owner: "VaultOwner", Vault: "Vault", Decimals: 6, Ref: 1_000_000, Epoch: 4,
		Prices: []api.MoneyPrice{{Model: "abcdef", Raw: 300_000_000_000}}}
	b.money.Ledger, b.money.StakeMemo = api.Ledger{Owner: "Node", Wallet: api.NoWallet, Balance: "0"}, "kvs1:node"
	b.money.FundMemos = map[string]string{"emission": "kvf1:emission", "pool": "kvf1:pool"}
	return b, daemon(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == api.PathMoney {
			json.NewEncoder(w).Encode(b.money)
			return
		}
		if r.URL.Path == api.PathCoverage {
			json.NewEncoder(w).Encode([]api.CoverageMap{{Model: "named", ID: "abcdef"}, {Model: "free", ID: "0123"}})
			return
		}
		var raw json.RawMessage
		json.NewDecoder(r.Body).Decode(&raw)
		b.asked[r.URL.Path] = raw
		if e, ok := b.reply[r.URL.Path].(*api.Error); ok {
			w.WriteHeader(e.Code.HTTPStatus())
			json.NewEncoder(w).Encode(api.Failure{Error: e})
			return
		}
		json.NewEncoder(w).Encode(b.reply[r.URL.Path])
	})
}

// was reads what was asked last at a path.
func was[T any](t *testing.T, b *bank, path string) (v T) {
	t.Helper()
	if err := json.Unmarshal(b.asked[path], &v); err != nil {
		t.Errorf("%s was asked %s: %v", path, b.asked[path], err)
	}
	return v
}

func testKeyPair(t *testing.T, seed byte) (file, wallet string) {
	t.Helper()
	key := ed25519.NewKeyFromSeed(append(make([]byte, 31), seed))
	var numbers []int
	for _, b := range key {
		numbers = append(numbers, int(b))
	}
	text, err := json.Marshal(numbers)
	file = filepath.Join(t.TempDir(), "id.json")
	if err == nil {
		err = os.WriteFile(file, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return file, walletOf(key)
}

// signedBy says whether a wallet signed a text as it is.
func signedBy(wallet, text, signature string) bool {
	key, err := base58.Decode(wallet)
	sig, err2 := base58.Decode(signature)
	return err == nil && err2 == nil && ed25519.Verify(key, []byte(text), sig)
}

func TestQuote(t *testing.T) {
	b, data := newBank(t)
	status, out, errs := kvasir(t, "", "quote", "--data", data, "--prompt-tokens", "600000", "--answer-tokens", "400001")
	if status != exitOK || !strings.Contains(out, "abcdef") || !strings.Contains(out, "0.300001 (300001 base units)") {
		t.Errorf("prices: %d %s %s", status, out, errs)
	}
	for name, want := range map[string]int{"named": exitOK, "abc": exitOK, "free": exitFail} {
		if status, out, errs = kvasir(t, "", "quote", name, "--data", data); status != want || (want == exitOK) != strings.Contains(out, "0.0006 (600 base units)") {
			t.Errorf("price of %s: %d %s %s", name, status, out, errs)
		}
	}
	if status, _, errs = kvasir(t, "", "quote", "xyz", "--data", data); status != exitFail || !strings.Contains(errs, "has a price yet") {
		t.Errorf("a model without a price: %d %s", status, errs)
	}
	body := filepath.Join(t.TempDir(), "body.json")
	if err := os.WriteFile(body, []byte("abc"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.reply[api.PathQuote] = api.Quote{ID: "q1", Memo: "kvr1:q1", Amount: "1500", Secret: "s3", VaultOwner: "V\x1b[2J"}
	status, out, errs = kvasir(t, "", "quote", "abc", "--data", data, "--body", body, "--answer-tokens", "5")
	want := api.QuoteRequest{Model: "abc", PromptTokens: 1000, AnswerTokens: 5, Owner: api.NoWallet,
		RequestHash: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
	if got := was[api.QuoteRequest](t, b, api.PathQuote); status != exitOK || got != want {
		t.Errorf("quote: %d %s, asked %+v", status, errs, got)
	}
	for _, part := range []string{"1500 base units", "kvr1:q1", "s3", "X-Kvasir-Quote"} {
		if !strings.Contains(out, part) || strings.Contains(out, "\x1b") {
			t.Errorf("%q does not contain %q", out, part)
		}
	}
	for _, args := range [][]string{{"quote", "a", "b"}, {"quote", "--prompt-tokens", "-1"}, {"ledger"}, {"ledger", "a", "b"}} {
		if status, _, _ := kvasir(t, "", args...); status != exitUsage {
			t.Errorf("%v: status %d", args, status)
		}
	}
}

func TestStatusEarnings(t *testing.T) {
	var out strings.Builder
	printStatus(&out, &api.Status{Earnings: &api.Earnings{Wallet: "W", Earned: "11", Held: "2", Bonded: "3", Requests: 4}})
	if want := "11 base units with 4 requests, 2 held, 3 bonded, for W"; !strings.Contains(out.String(), want) {
		t.Errorf("%s\ndoes not contain %q", &out, want)
	}
}

func TestUnits(t *testing.T) {
	for _, tt := range []struct {
		amount   string
		decimals int
		want     string
	}{
		{"0", 6, "0 (0 base units)"}, {"1", 6, "0.000001 (1 base units)"}, {"1500000", 6, "1.5 (1500000 base units)"},
		{"1000000", 6, "1 (1000000 base units)"}, {"42", 0, "42 (42 base units)"}, {"18446744073709551615", 9, "18446744073.709551615 (18446744073709551615 base units)"},
	} {
		if got := units(tt.amount, tt.decimals); got != tt.want {
			t.Errorf("%s with %d decimals: %s, want %s", tt.amount, tt.decimals, got, tt.want)
		}
	}
	if got := charge(1<<24, 1e17, 1e17); got != "167772160000000000000000" {
		t.Errorf("a large charge is %s", got)
	}
}

func TestWalletLink(t *testing.T) {
	b, data := newBank(t)
	file, wallet := testKeyPair(t, 1)
	b.reply[api.PathLinkText] = api.LinkText{Text: "line 1\nline 2\n", Domain: "D0main", Since: 77}
	b.reply[api.PathLink] = api.Linked{Node: "Node", Wallet: wallet}
	status, out, errs := kvasir(t, "", "wallet", "link", "--keypair", file, "--spend", "--data", data)
	got := was[api.Link](t, b, api.PathLink)
	if status != exitOK || got.Wallet != wallet || !got.Spend || got.Since != 77 || got.Format != "raw" || !signedBy(wallet, "line 1\nline 2\n", got.Signature) ||
		!strings.Contains(out, "linked to "+wallet) {
		t.Errorf("with a key pair: %d %s %s, asked %+v", status, out, errs, got)
	}
	if ask := was[api.LinkTextRequest](t, b, api.PathLinkText); ask != (api.LinkTextRequest{Wallet: wallet, Spend: true}) {
		t.Errorf("asked %+v", ask)
	}
	status, out, errs = kvasir(t, "", "wallet", "link", wallet, "--data", data)
	if status != exitOK || out != "line 1\nline 2\n" || !strings.Contains(errs, "--since 77") || !strings.Contains(errs, "D0main") {
		t.Errorf("what is signed elsewhere: %d %q %q", status, out, errs)
	}
	status, _, errs = kvasir(t, "", "wallet", "link", wallet, "--since", "77", "--signature", "sig", "--format", "v1", "--data", data)
	if got := was[api.Link](t, b, api.PathLink); status != exitOK || got != (api.Link{Wallet: wallet, Since: 77, Format: "v1", Signature: "sig"}) {
		t.Errorf("signed elsewhere: %d %s, asked %+v", status, errs, got)
	}
	b.reply[api.PathLink] = api.Linked{Node: "Node", Wallet: api.NoWallet}
	status, out, errs = kvasir(t, "", "wallet", "unlink", "--keypair", file, "--data", data)
	if got := was[api.Link](t, b, api.PathLink); status != exitOK || got.Wallet != api.NoWallet || got.Spend || !strings.Contains(out, "held until") {
		t.Errorf("unlink: %d %s %s, asked %+v", status, out, errs, got)
	}
	for _, args := range [][]string{
		{}, {"a", "b"}, {"--keypair", file, "other"}, {"--keypair", file, "--signature", "s"}, {wallet, "--signature", "s"},
	} {
		if status, _, _ := kvasir(t, "", append([]string{"wallet", "link", "--data", data}, args...)...); status != exitUsage {
			t.Errorf("link %v: status %d", args, status)
		}
	}
}

func TestWalletMoves(t *testing.T) {
	b, data := newBank(t)
	b.reply[api.PathDeposit] = api.Ledger{Owner: "W", Wallet: api.NoWallet, Balance: "1500"}
	b.reply[api.PathUnstake] = api.Ledger{Owner: "Node", Wallet: "W", Balance: "0", Unbonding: "7"}
	b.reply[api.PathClaim] = api.Payout{Owner: "W", Amount: "9"}
	for _, tt := range []struct {
		args []string
		want []string
	}{
		{[]string{"stake", "1500"}, []string{"Transfer 0.0015 (1500 base units) in one", "mint    Mint\n", "to      Vault, the vault, an account of VaultOwner\n",
			"\n  spl-token transfer Mint 0.0015 Vault --with-memo kvs1:node\n", "kvasir wallet stake 1500 --owner W --signature SIGNATURE\n"}},
		{[]string{"deposit", "2000000"}, []string{"memo    none\n", "\n  spl-token transfer Mint 2 Vault\n", "kvasir wallet deposit 2000000 --owner W --signature"}},
		{[]string{"deposit", "7", "--fund", "emission"}, []string{"\n  spl-token transfer Mint 0.000007 Vault --with-memo kvf1:emission\n"}},
	} {
		status, out, errs := kvasir(t, "", slices.Concat([]string{"wallet"}, tt.args, []string{"--owner", "W", "--data", data})...)
		if status != exitOK || b.asked[api.PathDeposit] != nil {
			t.Errorf("%v: %d %s", tt.args, status, errs)
		}
		for _, part := range tt.want {
			if !strings.Contains(out, part) {
				t.Errorf("%v: %q is not in\n%s", tt.args, part, out)
			}
		}
	}
	if status, _, errs := kvasir(t, "", "wallet", "deposit", "7", "--fund", "me", "--owner", "W", "--data", data); status != exitUsage || !strings.Contains(errs, "emission or pool") {
		t.Errorf("a fund that there is not: %d %s", status, errs)
	}
	var status int
	var out, errs string
	for name, stake := range map[string]bool{"stake": true, "deposit": false} {
		status, out, errs = kvasir(t, "", "wallet", name, "1500", "--owner", "W", "--signature", "sig", "--data", data)
		want := api.Deposit{Signature: "sig", Owner: "W", Amount: "1500", Stake: stake}
		if got := was[api.Deposit](t, b, api.PathDeposit); status != exitOK || got != want || !strings.Contains(out, "0.0015") {
			t.Errorf("%s: %d %s %s, asked %+v", name, status, out, errs, got)
		}
	}
	ids := map[string]bool{}
	for _, tt := range []struct{ name, path, want string }{{"unstake", api.PathUnstake, "0.000007"}, {"claim", api.PathClaim, "0.000009"}, {"claim", api.PathClaim, "to W"}} {
		status, out, errs = kvasir(t, "", "wallet", tt.name, "9", "--data", data)
		got := was[api.Move](t, b, tt.path)
		if status != exitOK || got.Amount != "9" || len(got.ID) != 64 || ids[got.ID] || !strings.Contains(out, tt.want) {
			t.Errorf("%s: %d %s %s, asked %+v", tt.name, status, out, errs, got)
		}
		ids[got.ID] = true
	}
	b.reply[api.PathClaim] = &api.Error{Code: api.CodeNotReady, Message: "the chain is late"}
	status, _, errs = kvasir(t, "", "wallet", "claim", "9", "--id", "aa", "--data", data)
	if got := was[api.Move](t, b, api.PathClaim); status != exitFail || got.ID != "aa" || !strings.Contains(errs, "the chain is late") || !strings.Contains(errs, "--id aa") {
		t.Errorf("a claim that failed: %d %s, asked %+v", status, errs, got)
	}
	for _, amount := range []string{"1e3", "+1", "01", "0", "-1", "1.5", " 1", "184467440737095516150", ""} {
		if status, _, _ := kvasir(t, "", "wallet", "claim", "--data", data, "--", amount); status != exitUsage {
			t.Errorf("claim %q: status %d", amount, status)
		}
	}
	if status, _, _ := kvasir(t, "", "wallet", "stake", "5", "--data", data); status != exitUsage {
		t.Errorf("stake of nobody: status %d", status)
	}
}

func TestComplain(t *testing.T) {
	b, data := newBank(t)
	file, wallet := testKeyPair(t, 1)
	b.reply[api.PathComplaintText] = api.ComplaintText{Text: "claim\nof it\n", Domain: "D0main"}
	b.reply[api.PathComplain] = api.Complained{Asked: "7", Due: 1, Recovered: "0"}
	status, out, errs := kvasir(t, "", "complain", "q1", "7", "--data", data)
	if got := was[api.Complaint](t, b, api.PathComplain); status != exitOK || got != (api.Complaint{Request: "q1", Amount: "7"}) || !strings.Contains(out, "0.000007") || b.asked[api.PathComplaintText] != nil {
		t.Errorf("by the linked node: %d %s %s, asked %+v", status, out, errs, got)
	}
	status, out, errs = kvasir(t, "", "complain", "q1", "7", "--keypair", file, "--data", data)
	if got := was[api.Complaint](t, b, api.PathComplain); status != exitOK || got.Format != "raw" || !signedBy(wallet, "claim\nof it\n", got.Signature) {
		t.Errorf("by the wallet: %d %s %s, asked %+v", status, out, errs, got)
	}
	if ask := was[api.ComplaintTextRequest](t, b, api.PathComplaintText); ask != (api.ComplaintTextRequest{Request: "q1", Amount: "7", Wallet: wallet}) {
		t.Errorf("asked %+v", ask)
	}
	delete(b.asked, api.PathComplain)
	status, out, errs = kvasir(t, "", "complain", "q1", "7", "--wallet", "W", "--data", data)
	if status != exitOK || out != "claim\nof it\n" || !strings.Contains(errs, "D0main") || !strings.Contains(errs, "complain q1 7 --signature") || b.asked[api.PathComplain] != nil {
		t.Errorf("what is signed elsewhere: %d %q %q", status, out, errs)
	}
	b.reply[api.PathComplain] = api.Complained{Asked: "7", Over: true, Recovered: "3"}
	status, out, errs = kvasir(t, "", "complain", "q1", "7", "--signature", "sig", "--format", "v1", "--data", data)
	want := api.Complaint{Request: "q1", Amount: "7", Format: "v1", Signature: "sig"}
	if got := was[api.Complaint](t, b, api.PathComplain); status != exitOK || got != want || !strings.Contains(out, "has paid 0.000003") {
		t.Errorf("signed elsewhere: %d %s %s, asked %+v", status, out, errs, got)
	}
	for _, args := range [][]string{{}, {"q1"}, {"q1", "0"}, {"q1", "1e3"}, {"q1", "7", "8"}, {"q1", "7", "--keypair", file, "--signature", "s"}} {
		if status, _, _ := kvasir(t, "", append([]string{"complain", "--data", data}, args...)...); status != exitUsage {
			t.Errorf("complain %v: status %d", args, status)
		}
	}
}

func TestWalletStatus(t *testing.T) {
	b, data := newBank(t)
	status, out, errs := kvasir(t, "", "wallet", "status", "--data", data)
	if status != exitOK || !strings.Contains(out, "linked to no wallet") {
		t.Errorf("not linked: %d %s %s", status, out, errs)
	}
	b.money.Ledger = api.Ledger{Owner: "Node", Wallet: "W", Balance: "0", Held: "5", Bonded: "6", Target: "8", Earned: "11", Requests: 3, Vesting: []api.Vesting{{Amount: "5", Free: 1}}}
	b.reply[api.PathLedger] = api.Ledger{Owner: "W", Wallet: api.NoWallet, Balance: "12",
		Payouts: []api.Payout{{Amount: "1", Outcome: 1}, {Amount: "2", Outcome: 9}, {Amount: "3", Outcome: -1}}}
	status, out, errs = kvasir(t, "", "wallet", "status", "--data", data)
	if status != exitOK || errs != "" {
		t.Errorf("%d %s", status, errs)
	}
	for _, part := range []string{"  W\n", "0.000011 (11 base units) with 3 requests", "Held", "0.000012", "paid, transaction", "outcome 9", "outcome -1"} {
		if !strings.Contains(out, part) {
			t.Errorf("%s\ndoes not contain %q", out, part)
		}
	}
	if status, out, _ = kvasir(t, "", "ledger", "W", "--data", data); status != exitOK || !strings.Contains(out, "0.000012") {
		t.Errorf("ledger: %d %s", status, out)
	}
}

func TestGovern(t *testing.T) {
	b, data := newBank(t)
	file, wallet := testKeyPair(t, 1)
	t.Chdir(t.TempDir())
	b.reply[api.PathPropose] = api.Proposed{Proposal: []byte{1, 2}, Texts: map[string]string{wallet: "fee: 1 -> 2\n", "Other": "fee: 1 -> 2\nfor Other\n"}}
	b.reply[api.PathActivate] = api.Activated{Sequence: 3, Epoch: 9}
	status, out, errs := kvasir(t, "", "govern", "propose", "fee=2", "floor=18446744073709551615", "--epoch", "9", "--data", data)
	want := api.Change{Values: map[string]uint64{"fee": 2, "floor": 1<<64 - 1}, Epoch: 9}
	if got := was[api.Change](t, b, api.PathPropose); status != exitOK || !reflect.DeepEqual(got, want) || !strings.Contains(out, "fee: 1 -> 2") {
		t.Errorf("propose: %d %s %s, asked %+v", status, out, errs, got)
	}
	if status, _, _ := kvasir(t, "", "govern", "propose", "fee=2", "--data", data); status != exitFail {
		t.Errorf("a proposal is written over: %d", status)
	}
	status, out, _ = kvasir(t, "", "govern", "sign", "proposal.json", "--wallet", "Other")
	if status != exitOK || out != "fee: 1 -> 2\nfor Other\n" {
		t.Errorf("what Other signs: %d %q", status, out)
	}
	for range 2 { // signing again replaces
		status, out, errs = kvasir(t, "", "govern", "sign", "proposal.json", "--keypair", file)
		if status != exitOK || !strings.Contains(out, "Signed by 1 wallets") || !strings.Contains(errs, "fee: 1 -> 2") {
			t.Errorf("sign: %d %s %s", status, out, errs)
		}
	}
	if status, out, errs = kvasir(t, "", "govern", "sign", "proposal.json", "--wallet", "Other", "--signature", "sig"); status != exitOK || !strings.Contains(out, "2 wallets") {
		t.Errorf("signed elsewhere: %d %s %s", status, out, errs)
	}
	status, out, errs = kvasir(t, "", "govern", "activate", "proposal.json", "--code", "123456", "--data", data)
	got := was[api.Activation](t, b, api.PathActivate)
	if status != exitOK || string(got.Proposal) != "\x01\x02" || got.Code != "123456" || len(got.Signatures) != 2 || !strings.Contains(out, "epoch 9") {
		t.Fatalf("activate: %d %s %s, asked %+v", status, out, errs, got)
	}
	if s := got.Signatures[0]; s.Wallet != wallet || s.Format != "raw" || !signedBy(wallet, "fee: 1 -> 2\n", s.Signature) {
		t.Errorf("signed %+v", s)
	}
	if s := got.Signatures[1]; s != (api.WalletSignature{Wallet: "Other", Format: "v0", Signature: "sig"}) {
		t.Errorf("added %+v", s)
	}
}

func TestGovernRefuses(t *testing.T) {
	file, _ := testKeyPair(t, 1)
	t.Chdir(t.TempDir())
	for name, text := range map[string]string{
		"good.json": `{"proposal": "AQI=", "texts": {"W": "text"}}`, "unknown.json": `{"proposal": "AQI=", "texts": {"W": "t"}, "more": 1}`,
		"empty.json": `{}`, "text.json": `proposal`, "large.json": strings.Repeat(" ", maxProposal+1),
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"propose"}, exitUsage, "takes what is to change"},
		{[]string{"propose", "fee"}, exitUsage, "NAME=VALUE"},
		{[]string{"propose", "fee=1e3"}, exitUsage, "NAME=VALUE"},
		{[]string{"propose", "fee=+1"}, exitUsage, "NAME=VALUE"},
		{[]string{"propose", "fee=1", "fee=2"}, exitUsage, "each name once"},
		{[]string{"propose", "fee=18446744073709551616"}, exitUsage, "NAME=VALUE"},
		{[]string{"sign", "good.json", "--keypair", file}, exitFail, "has no authority"},
		{[]string{"sign", "good.json"}, exitFail, "has no authority"},
		{[]string{"sign", "good.json", "--keypair", "good.json"}, exitFail, "no key pair"},
		{[]string{"sign"}, exitUsage, "takes one FILE"},
		{[]string{"sign", "none.json", "--wallet", "W"}, exitFail, "no such file"},
		{[]string{"sign", "unknown.json", "--wallet", "W"}, exitFail, "no proposal"},
		{[]string{"sign", "empty.json", "--wallet", "W"}, exitFail, "missing"},
		{[]string{"sign", "text.json", "--wallet", "W"}, exitFail, "no proposal"},
		{[]string{"sign", "large.json", "--wallet", "W"}, exitFail, "larger than"},
		{[]string{"activate", "good.json"}, exitUsage, "--code"},
	} {
		if status, _, errs := kvasir(t, "", append([]string{"govern"}, tt.args...)...); status != tt.status || !strings.Contains(errs, tt.want) {
			t.Errorf("govern %v: %d %s, want %d and %q", tt.args, status, errs, tt.status, tt.want)
		}
	}
}
