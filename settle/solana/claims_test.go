//go:build svm

package solana

import (
	"context"
	"strings"
	"sync"
	"testing"

	"kvasird/settle"
)

// spent is what a ledger keeps of payments for ever: signatures and messages. The real
// one is durable; here it outlives the clients.
type spent struct{ signatures, messages sync.Map }

func (s *spent) take(p Payment) bool {
	_, signature := s.signatures.LoadOrStore(p.Signature, true)
	_, message := s.messages.LoadOrStore(p.Message, true)
	return !signature && !message
}

// TestClaimedOnce is cases 3, 48 and 49: what is asked again, at once or after a crash
// proves the same, and a ledger that takes signature and message once credits it once.
func TestClaimedOnce(t *testing.T) {
	w := newWorld(t)
	again, parallel, crashed := w.paid(), w.paid(), w.paid()
	w.Advance(40)
	var ledger spent
	var first Payment
	for i := range 2 {
		p, err := w.client(w.mint, "a").Payment(context.Background(), again)
		if err != nil || i > 0 && p != first {
			t.Fatalf("asked again: %+v, %v, before %+v", p, err, first)
		}
		if took := ledger.take(p); took != (i == 0) {
			t.Errorf("case 3: taken %v the %d. time", took, i+1)
		}
		first = p
	}

	cl := w.client(w.mint, "a", "b")
	var wg sync.WaitGroup
	var mu sync.Mutex
	taken := 0
	for range 50 {
		wg.Go(func() {
			p, err := cl.Payment(context.Background(), parallel)
			if err != nil {
				t.Error(err)
			} else if ledger.take(p) {
				mu.Lock()
				defer mu.Unlock()
				taken++
			}
		})
	}
	wg.Wait()
	if taken != 1 {
		t.Errorf("case 48: 50 claims of one payment at once, %d taken", taken)
	}

	before, err := w.client(w.mint, "a").Payment(context.Background(), crashed)
	if err != nil || !ledger.take(before) {
		t.Fatal(err)
	}
	after, err := w.client(w.mint, "a").Payment(context.Background(), crashed)
	if err != nil || after != before {
		t.Errorf("case 49: after a restart %+v, %v, before %+v", after, err, before)
	}
	if ledger.take(after) {
		t.Error("case 49: taken again after a restart")
	}
}

// TestSignatureStrings is case 53: a signature is refused before a provider is asked.
func TestSignatureStrings(t *testing.T) {
	sig := settle.Signature{0, 0, 0, 7}
	good := sig.String()
	if !strings.HasPrefix(good, "111") {
		t.Fatalf("%s has no leading ones", good)
	}
	if got, err := settle.ParseSignature(good); err != nil || got != sig {
		t.Errorf("leading ones: %v, %v", got, err)
	}
	for name, text := range map[string]string{"one leading 1 less (63 bytes)": good[1:], "one more (65 bytes)": "1" + good,
		"a space before": " " + good, "a space after": good + " ", "a newline": good + "\n", "empty": "", "hexadecimal": strings.Repeat("0f", 64)} {
		if got, err := settle.ParseSignature(text); err == nil {
			t.Errorf("%s: read as %s", name, got)
		}
	}
}
