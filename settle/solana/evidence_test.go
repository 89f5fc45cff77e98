package solana

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// payment is a good payment as a node shows it, built without a chain.
func payment(t testing.TB) (Config, Claim, map[string]any) {
	alice, operator, mint := settletest.NewWallet("alice"), settletest.NewWallet("operator"), settletest.NewWallet("mint").Key
	m := settletest.Mint{Key: mint, Program: settletest.Token, Decimals: 6}
	from, to := m.ATA(alice.Key), m.ATA(operator.Key)
	raw := settletest.Sign(settletest.Tx{Signers: []settletest.Wallet{alice}, Blockhash: settle.Key{1}, Instructions: []settletest.Instruction{
		m.TransferChecked(from, to, alice.Key, 100), settletest.Memo("quote", alice.Key)}})
	balance := func(index int, owner settle.Key, amount string) any {
		return map[string]any{"accountIndex": index, "mint": mint, "owner": owner, "programId": m.Program, "uiTokenAmount": map[string]any{"amount": amount}}
	}
	shown := map[string]any{"slot": 7, "blockTime": 1000, "version": "legacy", "transaction": []any{base64.StdEncoding.EncodeToString(raw), "base64"},
		"meta": map[string]any{"err": nil, "preBalances": []int{1, 1, 1, 1, 1, 1}, "postBalances": []int{1, 1, 1, 1, 1, 1}, "innerInstructions": []any{},
			"preTokenBalances":  []any{balance(1, alice.Key, "100"), balance(2, operator.Key, "0")},
			"postTokenBalances": []any{balance(1, alice.Key, "0"), balance(2, operator.Key, "100")},
			"loadedAddresses":   map[string]any{"writable": []any{}, "readonly": []any{}}}}
	cfg := Config{Vault: Vault{Owner: operator.Key, Mint: mint, Program: m.Program}, Decimals: 6, Timeout: 30 * time.Second}
	return cfg, Claim{Signature: settle.Signature(raw[1:65]), Owner: alice.Key, Amount: 100, Memo: "quote"}, shown
}

// node answers every call with one body.
func node(t testing.TB, body func() string) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body()) }))
	t.Cleanup(s.Close)
	return s.URL + "/?key=secret"
}

func TestPaymentWithoutChain(t *testing.T) {
	cfg, claim, shown := payment(t)
	text, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "result": shown})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Providers = []string{node(t, func() string { return string(text) })}
	cl, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := cl.Payment(context.Background(), claim); err != nil || p.Amount != 100 || p.Slot != 7 || p.Version != -1 {
		t.Errorf("%+v, %v", p, err)
	}
}

// TestAnswers is what a provider may answer that means nothing.
func TestAnswers(t *testing.T) {
	cfg, claim, _ := payment(t)
	for name, tt := range map[string]struct {
		body string
		want error
		says string
	}{
		"nothing":           {"", ErrProvider, "no JSON-RPC"},
		"another id":        {`{"jsonrpc":"2.0","id":2,"result":null}`, ErrProvider, "no JSON-RPC"},
		"no version":        {`{"id":1,"result":null}`, ErrProvider, "no JSON-RPC"},
		"no result":         {`{"jsonrpc":"2.0","id":1}`, ErrProvider, "without a result"},
		"null":              {`{"jsonrpc":"2.0","id":1,"result":null}`, ErrNotYet, ""},
		"another shape":     {`{"jsonrpc":"2.0","id":1,"result":{"slot":"x"}}`, ErrProvider, "shape"},
		"amount in floats":  {`{"jsonrpc":"2.0","id":1,"result":{"meta":{"preTokenBalances":[{"uiTokenAmount":{"amount":"1e3"}}]}}}`, ErrProvider, "shape"},
		"negative amount":   {`{"jsonrpc":"2.0","id":1,"result":{"meta":{"preTokenBalances":[{"uiTokenAmount":{"amount":"-1"}}]}}}`, ErrProvider, "shape"},
		"no transaction":    {`{"jsonrpc":"2.0","id":1,"result":{"slot":1}}`, ErrMalformed, "base64"},
		"an error":          {`{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"http://secret"}}`, ErrProvider, "-32000"},
		"more than allowed": {strings.Repeat(" ", answerLimit+1), ErrProvider, "more than"},
	} {
		cfg.Providers = []string{node(t, func() string { return tt.body })}
		cl, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		_, err = cl.Payment(context.Background(), claim)
		if !errors.Is(err, tt.want) || errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tt.says) ||
			strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "127.0.0.1") {
			t.Errorf("%s: %v, want %v with %q", name, err, tt.want, tt.says)
		}
	}
}

// TestSlowProvider is one that sends a byte now and then: the time is for all of it.
func TestSlowProvider(t *testing.T) {
	cfg, claim, _ := payment(t)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			fmt.Fprint(w, " ")
			w.(http.Flusher).Flush()
			time.Sleep(20 * time.Millisecond)
		}
	}))
	defer s.Close()
	cfg.Providers, cfg.Timeout = []string{s.URL}, 200*time.Millisecond
	cl, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if _, err := cl.Payment(context.Background(), claim); !errors.Is(err, ErrProvider) || !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if d := time.Since(start); d > 3*time.Second {
		t.Errorf("it took %v", d)
	}
}

// TestRedirect sees that a key is not carried to where a provider points.
func TestRedirect(t *testing.T) {
	cfg, claim, _ := payment(t)
	asked := false
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	defer other.Close()
	s := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	defer s.Close()
	cfg.Providers = []string{s.URL}
	cl, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cl.Payment(context.Background(), claim); !errors.Is(err, ErrProvider) || asked {
		t.Errorf("%v, the other was asked: %v", err, asked)
	}
}

func TestConfig(t *testing.T) {
	cfg, _, _ := payment(t)
	cfg.Providers = []string{"https://node.example/secret"}
	for _, tt := range []struct {
		name   string
		change func(*Config)
		says   string
	}{
		{"good", func(*Config) {}, ""},
		{"no provider", func(c *Config) { c.Providers = nil }, "no RPC provider"},
		{"no URL", func(c *Config) { c.Providers = []string{"secret\x7f"} }, "provider 1"},
		{"another scheme", func(c *Config) { c.Providers = []string{"ws://secret"} }, "provider 1"},
		{"no token program", func(c *Config) { c.Vault.Program = settletest.System }, "not a token program"},
		{"another account", func(c *Config) { c.Vault.Account = c.Vault.Mint }, "associated"},
	} {
		c := cfg
		tt.change(&c)
		_, err := New(c)
		if (err == nil) != (tt.says == "") || err != nil && (!strings.Contains(err.Error(), tt.says) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.says)
		}
	}
}

func FuzzAnswer(f *testing.F) {
	cfg, claim, shown := payment(f)
	text, err := json.Marshal(shown)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"meta":{"innerInstructions":[{"index":0,"instructions":[{"programIdIndex":1,"accounts":[0],"data":"3"}]}]}}`))
	cfg.Providers = []string{"http://127.0.0.1:1"}
	cl, err := New(cfg)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var a answer
		if json.Unmarshal(text, &a) != nil {
			return
		}
		e, err := readEvidence(&a)
		if err != nil {
			if !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrUnverifiable) {
				t.Errorf("%v has no reason", err)
			}
			return
		}
		for _, r := range rules {
			if err := r.check(cl, e, claim); err != nil && !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrUnknown) {
				t.Errorf("%s: %v has no class", r.name, err)
			}
		}
		if _, err := cl.payment(e, claim); err != nil && !errors.Is(err, ErrUnknown) {
			t.Error(err)
		}
	})
}

func FuzzTransaction(f *testing.F) {
	alice := settletest.NewWallet("alice")
	for v := range 3 {
		f.Add(settletest.Sign(settletest.Tx{Version: v, Signers: []settletest.Wallet{alice}, Instructions: []settletest.Instruction{settletest.Memo("m", alice.Key)}}))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		tx, got, err := readTransaction([]string{base64.StdEncoding.EncodeToString(raw), "base64"})
		if err != nil {
			return
		}
		if !bytes.Equal(raw, got) {
			t.Error("other bytes")
		}
		want, err := tx.Message.MarshalBinary()
		if err != nil || !bytes.Equal(messageOf(tx, raw), want) {
			t.Errorf("message %x, want %x, %v", messageOf(tx, raw), want, err)
		}
	})
}
