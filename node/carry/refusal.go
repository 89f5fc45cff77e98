package carry

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"kvasird/node/gateway"
)

// refusal is a REFUSED.
type refusal struct {
	code          Code
	retry         time.Duration
	prompt, limit int
	lacks         gateway.Abilities
	text          string
}

func (r *refusal) Error() string { return r.code.String() + ": " + r.text }

func putRefusal(dst []byte, r *refusal) []byte {
	text := strings.ToValidUTF8(r.text[:min(len(r.text), maxText)], "") // cut inside a rune, or quoting what is no text
	le := binary.LittleEndian
	dst = le.AppendUint32(dst, uint32(r.code))
	dst = le.AppendUint32(dst, uint32(min(max(r.retry.Milliseconds(), 0), int64(maxRetry/time.Millisecond))))
	dst = le.AppendUint32(dst, uint32(r.prompt)|lackBits(r.lacks))
	dst = le.AppendUint32(dst, uint32(r.limit))
	return append(dst, text...)
}

// What a server lacks, as bits.
const (
	lackGrammar = 1 << iota
	lackSpecial
	lackLogprobs

	allLacks = lackGrammar | lackSpecial | lackLogprobs
)

func lackBits(a gateway.Abilities) (bits uint32) {
	if a.Grammar {
		bits |= lackGrammar
	}
	if a.Special {
		bits |= lackSpecial
	}
	if a.Logprobs {
		bits |= lackLogprobs
	}
	return bits
}

// maxRetry is the longest time after which a server asks to come again.
const maxRetry = 10 * time.Minute

func decodeRefusal(payload []byte) (*refusal, error) {
	if len(payload) < refusedHead || len(payload) > refusedHead+maxText {
		return nil, fmt.Errorf("refusal of %d bytes, want %d to %d", len(payload), refusedHead, refusedHead+maxText)
	}
	le := binary.LittleEndian
	code, retry, prompt, limit := le.Uint32(payload), le.Uint32(payload[4:]), le.Uint32(payload[8:]), le.Uint32(payload[12:])
	r := &refusal{Code(code), time.Duration(retry) * time.Millisecond, int(prompt), int(limit), gateway.Abilities{}, string(payload[refusedHead:])}
	if r.code == CodeLacks {
		if limit != 0 || prompt == 0 || prompt > allLacks {
			return nil, fmt.Errorf("refusal for wishes %#x and %d", prompt, limit)
		}
		r.lacks = gateway.Abilities{Grammar: prompt&lackGrammar != 0, Special: prompt&lackSpecial != 0, Logprobs: prompt&lackLogprobs != 0}
		r.prompt, prompt = 0, 0
	}
	switch {
	case code == 0 || code > uint32(lastCode):
		return nil, fmt.Errorf("refusal with code %#x", code)
	case retry > 0 && r.code != CodeBusy || r.retry > maxRetry:
		return nil, fmt.Errorf("refusal of code %v to come again after %v, at most %v", r.code, r.retry, maxRetry)
	case prompt > MaxPrompt || limit > math.MaxInt32 || r.code == CodeLong != (prompt > 0 && limit > 0) || prompt|limit != 0 && r.code != CodeLong:
		return nil, fmt.Errorf("refusal of code %v with a prompt of %d tokens where %d fit", r.code, prompt, limit)
	case !utf8.ValidString(r.text):
		return nil, errors.New("refusal in text that is not UTF-8")
	}
	r.text = strings.Map(func(c rune) rune {
		if !unicode.IsPrint(c) {
			return ' '
		}
		return c
	}, r.text)
	return r, nil
}
