package p2p

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"
)

// keptEnvelope is testEnvelope, and its renewals.
func keptEnvelope(t testing.TB) (Envelope, renewals) {
	t.Helper()
	r := renewals{seed: [renewalBytes]byte([]byte("sixteen bytes...")), most: 10}
	e, anchor := testEnvelope(t), r.at(0)
	e.Step, e.Anchor = time.Minute, anchor.value[:]
	return e, r
}

func TestRenewalLiteralBytes(t *testing.T) {
	e, r := keptEnvelope(t)
	raw, err := seedIdentity(t, 1).Seal("testnet", e)
	if err != nil {
		t.Fatal(err)
	}
	const anchor = "c2355458e158a32c85c3a128e6366e69"
	want := unhex(t, "a8"+strings.TrimPrefix(recordHex, "a6")+"07 50"+anchor+"08 19ea60")
	if record := raw[:len(raw)-64]; !bytes.Equal(record, want) {
		t.Errorf("record\n got %x\nwant %x", record, want)
	}
	if got := hex.EncodeToString(r.at(3).append(nil)); got != "0300e736eff086509c67f5bb076dd6183bc9" {
		t.Errorf("third renewal %s", got)
	}
	back, err := OpenEnvelope("testnet", raw, envelopeTime)
	if err != nil || !bytes.Equal(back.Anchor, e.Anchor) || back.Step != e.Step || back.Renewed != 0 {
		t.Errorf("opened %+v: %v", back, err)
	}
}

func TestAnchorRefused(t *testing.T) {
	for name, change := range map[string]func(*Envelope){
		"without a step":    func(e *Envelope) { e.Step = 0 },
		"without an anchor": func(e *Envelope) { e.Anchor = nil },
		"short anchor":      func(e *Envelope) { e.Anchor = e.Anchor[1:] },
		"short step":        func(e *Envelope) { e.Step = minStep - time.Millisecond },
		"long step":         func(e *Envelope) { e.Step = MaxValidity + time.Millisecond },
	} {
		e, _ := keptEnvelope(t)
		change(&e)
		if _, err := seedIdentity(t, 1).Seal("testnet", e); !errors.Is(err, ErrEnvelope) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCheckRenewal(t *testing.T) {
	_, chain := keptEnvelope(t)
	forged := chain.at(4)
	forged.value[0] ^= 1
	renumbered := chain.at(4)
	renumbered.n = 3
	tests := []struct {
		name     string
		change   func(*Envelope)
		r, known renewal
		at       time.Duration
		want     error
	}{
		{"first", nil, chain.at(1), renewal{}, time.Minute, nil},
		{"a later one, the first that is heard", nil, chain.at(4), renewal{}, 4 * time.Minute, nil},
		{"after another", nil, chain.at(4), chain.at(2), 4 * time.Minute, nil},
		{"as early as a clock may be ahead", nil, chain.at(4), renewal{}, 3 * time.Minute, nil},
		{"before its time", nil, chain.at(4), renewal{}, 3*time.Minute - time.Second, ErrFuture},
		{"again", nil, chain.at(4), chain.at(4), 4 * time.Minute, ErrEnvelope},
		{"an earlier one", nil, chain.at(3), chain.at(4), 4 * time.Minute, ErrEnvelope},
		{"none", nil, renewal{}, renewal{}, 4 * time.Minute, ErrEnvelope},
		{"forged", nil, forged, renewal{}, 4 * time.Minute, ErrForged},
		{"under another number", nil, renumbered, renewal{}, 4 * time.Minute, ErrForged},
		{"after a forged one", nil, chain.at(5), forged, 5 * time.Minute, ErrForged},
		{"of an envelope without", func(e *Envelope) { e.Step, e.Anchor = 0, nil }, chain.at(1), renewal{}, time.Minute, ErrEnvelope},
		{"of another envelope", func(e *Envelope) { e.Anchor = make([]byte, renewalBytes) }, chain.at(1), renewal{}, time.Minute, ErrForged},
		{"beyond a life", func(e *Envelope) { e.Step = time.Hour }, renewal{n: 24}, renewal{}, 25 * time.Hour, ErrOversized},
	}
	for _, tt := range tests {
		e, _ := keptEnvelope(t)
		if tt.change != nil {
			tt.change(&e)
		}
		if err := e.checkRenewal(tt.r, tt.known, e.Issued.Add(tt.at)); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
	}
}

// A life is never longer than others allow, and every renewal of it is accepted.
func TestRenewalsOfALife(t *testing.T) {
	for _, step := range []time.Duration{minStep, 30 * time.Second, 392 * time.Second, MaxValidity} {
		r, err := newRenewals(90*time.Second, step)
		if err != nil {
			t.Fatal(err)
		}
		e, last := testEnvelope(t), r.at(0)
		e.Validity, e.Step, e.Anchor = 90*time.Second, step, bytes.Clone(last.value[:])
		last = renewal{}
		for n := 1; n <= r.most; n += 1 + n/3 {
			if err := e.checkRenewal(r.at(n), last, e.Issued.Add(time.Duration(n)*step)); err != nil {
				t.Errorf("every %v: renewal %d of %d: %v", step, n, r.most, err)
			}
			last = r.at(n)
		}
		if life := e.Validity + time.Duration(r.most+1)*step; life <= MaxLife {
			t.Errorf("every %v: ends after %d, at less than %v", step, r.most, MaxLife)
		}
	}
	if _, err := newRenewals(time.Minute, time.Second); err == nil {
		t.Error("renewals every second are not refused")
	}
}

func FuzzTold(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, 2*toldSize))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := parseTold(b)
		if err != nil {
			return
		}
		var again []byte
		for _, r := range list {
			again = r.append(again)
		}
		if !bytes.Equal(again, b) {
			t.Errorf("%x read as %v", b, list)
		}
	})
}

func FuzzKnown(f *testing.F) {
	f.Add([]byte{0})
	f.Add(make([]byte, 1+toldSize))
	f.Add(append([]byte{2}, make([]byte, 16+toldSize)...))
	f.Add([]byte{1, 2})
	f.Fuzz(func(t *testing.T, b []byte) {
		lacking, later, err := parseKnown(b)
		if err == nil && 1+8*len(lacking)+toldSize*len(later) != len(b) {
			t.Errorf("%d authors and %d renewals of %d bytes", len(lacking), len(later), len(b))
		}
	})
}
