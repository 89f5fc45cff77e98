package govern

import (
	"bytes"
	"encoding/base32"
	"errors"
	"strings"
	"testing"

	"kvasird/settle"
)

// The vectors of RFC 6238, appendix B, in six digits.
func TestCodesOfTheRFC(t *testing.T) {
	secret := base32.StdEncoding.EncodeToString([]byte("12345678901234567890"))
	for now, code := range map[uint64]string{59: "287082", 1111111109: "081804", 1111111111: "050471", 1234567890: "005924", 2000000000: "279037", 20000000000: "353130"} {
		step, err := attempts{}.check(secret, code, now)
		if err != nil || step != now/30 {
			t.Errorf("at %d: step %d, %v", now, step, err)
		}
		for _, off := range []uint64{now - 30, now + 30} {
			if _, err := (attempts{}).check(secret, code, off); err != nil {
				t.Errorf("at %d, a step off: %v", off, err)
			}
		}
		if _, err := (attempts{}).check(secret, code, now+61); !errors.Is(err, ErrCode) {
			t.Errorf("at %d, later: %v", now+61, err)
		}
		for _, bad := range []string{"", " " + code, code + " ", code[1:], code + "0", "+" + code[1:], strings.Repeat("9", 1<<16)} {
			if _, err := (attempts{}).check(secret, bad, now); !errors.Is(err, ErrCode) {
				t.Errorf("at %d, %.20q: %v", now, bad, err)
			}
		}
		for last, want := range map[uint64]error{now/30 - 1: nil, now / 30: ErrCodeUsed, now/30 + 1: ErrCodeUsed} {
			if _, err := (attempts{step: last}).check(secret, code, now); !errors.Is(err, want) {
				t.Errorf("at %d, after step %d: %v, want %v", now, last, err, want)
			}
		}
	}
}

func TestLocksGrow(t *testing.T) {
	for failures, minutes := range map[int]uint64{0: 0, 4: 0, 5: 15, 6: 30, 7: 60, 11: 960, 12: 1440, 1000: 1440} {
		want := minutes * 60
		if want > 0 {
			want += 1000
		}
		if got := (attempts{failures: failures, lastFailure: 1000}).lockedUntil(); got != want {
			t.Errorf("%d failures: until %d, want %d", failures, got, want)
		}
	}
}

func TestSecrets(t *testing.T) {
	key, network := [32]byte{1}, settle.Hash{2}
	text, sealed, err := NewSecret(bytes.NewReader(bytes.Repeat([]byte{5}, 64)), key, network)
	if err != nil || len(text) != 32 || bytes.Contains(sealed, bytes.Repeat([]byte{5}, secretBytes)) {
		t.Fatalf("%s, %x, %v", text, sealed, err)
	}
	if back, err := openSecret(key, network, sealed); back != text || err != nil {
		t.Errorf("%s, want %s, %v", back, text, err)
	}
	for i := range sealed {
		bad := bytes.Clone(sealed)
		bad[i] ^= 1
		if _, err := openSecret(key, network, bad); !errors.Is(err, ErrSecret) {
			t.Errorf("byte %d changed: %v", i, err)
		}
	}
	for name, err := range map[string]error{
		"cut":             second(openSecret(key, network, sealed[1:])),
		"nothing":         second(openSecret(key, network, nil)),
		"another key":     second(openSecret([32]byte{3}, network, sealed)),
		"another network": second(openSecret(key, settle.Hash{3}, sealed)),
	} {
		if !errors.Is(err, ErrSecret) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := NewSecret(strings.NewReader("short"), key, network); err == nil {
		t.Error("a secret of little randomness")
	}
}

func second(_ string, err error) error { return err }
