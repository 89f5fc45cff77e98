//go:build cgo && linux && svm

package node

import (
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/mr-tron/base58"

	"kvasird/node/api"
	"kvasird/settle/settletest"
)

// asksHere asks over the control socket until it is known whether that is paid.
func (w *town) asksHere(req api.AskRequest) (text string, done api.AskDone, err error) {
	w.t.Helper()
	var notYet *api.Error
	for {
		text = ""
		done, err = w.controlOf("entry").Ask(w.ctx, req, func(ev api.AskEvent) error { text += ev.Text; return nil })
		if !errors.As(err, &notYet) || notYet.Code != api.CodeNotReady {
			return text, done, err
		}
	}
}

// refusedHere asks what nobody pays for.
func (w *town) refusedHere(part string) {
	w.t.Helper()
	_, _, err := w.asksHere(api.AskRequest{Prompt: questions[0]})
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.CodePayment || !strings.Contains(e.Message, part) {
		w.t.Errorf("got %v, want %q", err, part)
	}
	body := must(json.Marshal(map[string]any{"model": "backbone", "messages": []map[string]string{{"role": "user", "content": questions[0]}}}))(w.t)
	if got := w.until(http.StatusPaymentRequired, body, nil); !strings.Contains(string(got), part) { // which is what a chat shows
		w.t.Errorf("over HTTP: %s, want %q", got, part)
	}
}

// TestAskIsPaid: a question over the control socket is paid by the wallet that lets the node spend,
// for what was answered, and its work is credited; without one it says what to do.
func TestAskIsPaid(t *testing.T) {
	w := newTown(t)
	settles, _ := w.here("settle", "--role", "settle", "--config", w.config)
	entry, _ := w.here("entry", "--role", "backbone,entry", "--model", w.whole, "--peer", localAddr(must(settles.Status(w.ctx))(t)))
	w.serves(entry)
	c := w.controlOf("entry")
	w.refusedHere("`kvasir wallet link --spend`")

	alice := w.alice.Key.String()
	text := must(c.LinkText(w.ctx, api.LinkTextRequest{Wallet: alice, Spend: true}))(t)
	must(c.Link(w.ctx, api.Link{Wallet: alice, Spend: true, Since: text.Since, Format: "raw",
		Signature: base58.Encode(ed25519.Sign(w.alice.Private, []byte(text.Text)))}))(t)
	w.refusedHere("`kvasir wallet deposit AMOUNT`")

	sig := w.chain.Run([]settletest.Wallet{w.alice}, w.mint.TransferChecked(w.mint.ATA(w.alice.Key), w.mint.ATA(w.operator.Key), w.alice.Key, 1_000_000))
	w.chain.Advance(40)
	had := amount(t, must(c.Deposit(w.ctx, api.Deposit{Signature: sig.String(), Owner: alice, Amount: "1000000"}))(t).Balance)
	answer, done, err := w.asksHere(api.AskRequest{Prompt: questions[0], MaxTokens: 64})
	if err != nil || answer == "" || done.Finish != "stop" {
		t.Fatalf("answered %q, %+v, %v", answer, done, err)
	}
	w.becomes("the entry is paid", func() bool {
		m, err := c.Money(w.ctx)
		return err == nil && m.Ledger.Requests == 1 && m.Ledger.Earned != "0"
	})
	m := must(c.Money(w.ctx))(t)
	has, earned := amount(t, must(c.Ledger(w.ctx, alice))(t).Balance), amount(t, m.Ledger.Earned)
	t.Logf("%d tokens cost %d, of which %d were earned", done.PromptTokens+done.Tokens, had-has, earned)
	if cost := had - has; has >= had || earned >= cost || earned < cost*3/4 {
		t.Errorf("%d were debited, %d were earned", cost, earned)
	}
}
