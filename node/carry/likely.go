package carry

import (
	"encoding/binary"
	"fmt"
	"math"

	"kvasird/node/gateway"
)

// likely is a LIKELY: a token with its log-probability and the likeliest at its place, all without
// bytes, which the entry has.
type likely struct {
	cached int
	of     gateway.TokenProb
	top    []gateway.TokenProb
}

func putLikely(dst []byte, l *likely) []byte {
	dst = appendProb(binary.LittleEndian.AppendUint32(dst, uint32(l.cached)), l.of)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(l.top)))
	for _, p := range l.top {
		dst = appendProb(dst, p)
	}
	return dst
}

func appendProb(dst []byte, p gateway.TokenProb) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(p.ID))
	return binary.LittleEndian.AppendUint32(dst, math.Float32bits(p.Logprob))
}

// decodeLikely reads tokens up to a vocabulary; 0: any.
func decodeLikely(payload []byte, vocab int) (l likely, err error) {
	if len(payload) < likelyHead {
		return l, fmt.Errorf("likely frame of %d bytes, want at least %d", len(payload), likelyHead)
	}
	le := binary.LittleEndian
	cached, n := le.Uint32(payload), le.Uint32(payload[12:])
	switch {
	case cached > MaxPrompt:
		return l, fmt.Errorf("%d tokens were not computed again, at most %d can be", cached, MaxPrompt)
	case n > MaxTop || len(payload) != likelyHead+topSize*int(n):
		return l, fmt.Errorf("likely frame of %d bytes with %d tokens beside, at most %d", len(payload), n, MaxTop)
	}
	l.cached = int(cached)
	if l.of, err = readProb(payload[4:], vocab); err != nil {
		return l, err
	}
	for b := payload[likelyHead:]; len(b) > 0; b = b[topSize:] {
		p, err := readProb(b, vocab)
		if err != nil {
			return l, err
		}
		l.top = append(l.top, p)
	}
	return l, nil
}

func readProb(b []byte, vocab int) (p gateway.TokenProb, err error) {
	list, err := decodeTokens(b[:4], vocab)
	if err != nil {
		return p, err
	}
	p = gateway.TokenProb{ID: list[0], Logprob: math.Float32frombits(binary.LittleEndian.Uint32(b[4:]))}
	if !(p.Logprob <= 0) { // NaN too
		return p, fmt.Errorf("log-probability %v of token %d", p.Logprob, p.ID)
	}
	return p, nil
}
