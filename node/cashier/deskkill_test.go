//go:build svm

package cashier

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// life is a request from its payment to its end, and after how many steps who does it is
// killed.
type life struct {
	Dir, URL      string
	Genesis, Mint settle.Key
	Began, At     int64
	Quote         settle.QuoteID
	X402          []byte // or
	Signature     settle.Signature
	Steps         int
}

const lifeEnv = "KVASIR_TEST_LIFE"

// live does what is left of a life, from wherever it is.
func (s *shop) live(l life) error {
	var refusal *Refusal
	for began := time.Now(); ; {
		var err error
		if l.X402 != nil {
			_, err = s.teller().PayX402(s.Context(), Partial{l.Quote, l.X402})
		} else {
			_, err = s.teller().Pay(s.Context(), Proof{l.Quote, l.Signature, s.alice.Key})
		}
		if err == nil {
			break
		}
		if !errors.As(err, &refusal) || refusal.Code != CodeNotYet || time.Since(began) > 30*time.Second {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
	if _, err := s.teller().Run(s.Context(), l.Quote); err != nil && (!errors.As(err, &refusal) || refusal.Code != CodeState) {
		return err
	}
	_, err := s.teller().End(s.Context(), s.ended(l.Quote, 1000, "", s.work(1000)))
	return err
}

// TestLife is the process that is killed: it does nothing where nobody says what.
func TestLife(t *testing.T) {
	text := os.Getenv(lifeEnv)
	if text == "" {
		return
	}
	var l life
	must[int](t)(0, json.Unmarshal([]byte(text), &l))
	w := &bank{mint: settletest.Mint{Key: l.Mint, Program: settletest.Token, Decimals: 6}, operator: settletest.NewWallet("operator"), genesis: l.Genesis}
	s := shopAt(t, w, l.Began, l.URL)
	s.at.Store(l.At)
	s.dir = l.Dir
	s.reopen()
	s.start()
	cut = func(string) {
		if l.Steps--; l.Steps < 0 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	must[int](t)(0, s.live(l))
}

// TestDeskKilled kills the process at every step of a request. After a restart it comes to
// the same end, and it is paid once.
func TestDeskKilled(t *testing.T) {
	for way, least := range map[string]int{"own wallet": 6, "x402": 7} {
		s := newShop(t)
		s.ticking()
		for n := 0; ; n++ {
			s.Advance(int(150 - s.Slot()%150)) // a blockhash is as new as it can be
			s.at.Store(s.blockTime(t))         // the chain's time goes on faster
			q := s.quote()
			l := life{Dir: s.dir, URL: s.URL("a"), Genesis: s.genesis, Mint: s.mint.Key, Began: s.cfg.Began.Unix(), At: s.at.Load(), Quote: q.ID, Steps: n}
			if way == "x402" {
				l.X402 = s.x402(q, q.Amount)
			} else {
				l.Signature = s.pay(q.Amount, q.ID.Memo())
			}
			before, vault := must[settle.Amount](t)(s.cfg.Books.Balance(settle.Account{Kind: settle.Inflow})), s.has(s.operator.Key)
			must[int](t)(0, s.cfg.Books.Close())
			killed := l.run(t)
			s.reopen()
			s.start()
			s.cfg.Books.verified(t)
			for range 2 { // and once more when all is over
				if err := s.live(l); err != nil {
					t.Fatalf("%s, killed at step %d: %v", way, n, err)
				}
			}
			if r := must[settle.Request](t)(s.cfg.Books.Request(q.ID)); r.State != settle.Done || r.Paid != q.Amount {
				t.Errorf("%s, killed at step %d: it is %s, %d were paid", way, n, r.State, r.Paid)
			}
			s.cfg.Books.mustHave(t, settle.Inflow, settle.Key{}, before+q.Amount)
			if got := s.has(s.operator.Key); way == "x402" && got != vault+q.Amount || got != before+q.Amount {
				t.Errorf("%s, killed at step %d: the vault has %d, it had %d", way, n, got, vault)
			}
			s.cfg.Books.verified(t)
			if !killed {
				if n < least {
					t.Errorf("%s: killed at %d steps only", way, n)
				}
				break
			}
		}
	}
}

// run runs a life in a process of its own.
func (l life) run(t *testing.T) (killed bool) {
	t.Helper()
	text := must[[]byte](t)(json.Marshal(l))
	cmd := exec.Command(os.Args[0], "-test.run=^TestLife$", "-test.count=1")
	cmd.Env = append(os.Environ(), lifeEnv+"="+string(text))
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	killed = errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
	if err != nil && !killed {
		t.Fatalf("%d steps: %v\n%s", l.Steps, err, out)
	}
	return killed
}
