package ring

import (
	"encoding/binary"
	"fmt"
	"kvasird/p2p"
	"math"
)

// tokens is a TOKENS.
type tokens struct {
	epoch  uint32
	pos    int
	finish finish
	list   []int32 // a view of the payload
	probs  []Prob  // of each token; nil: none were asked for
}

func putTokens(dst []byte, t tokens) []byte {
	le := binary.LittleEndian
	dst = le.AppendUint32(dst, t.epoch)
	dst = le.AppendUint32(dst, uint32(t.pos))
	dst = le.AppendUint32(dst, uint32(len(t.list)))
	if t.probs == nil {
		return p2p.AppendInts(append(dst, byte(t.finish), 0, 0, 0), t.list)
	}
	dst = p2p.AppendInts(append(dst, byte(t.finish), 1, 0, 0), t.list)
	for _, p := range t.probs {
		dst = le.AppendUint32(dst, math.Float32bits(p.Logprob))
		dst = le.AppendUint32(dst, uint32(len(p.Top)))
		for _, o := range p.Top {
			dst = le.AppendUint32(dst, uint32(o.Token))
			dst = le.AppendUint32(dst, math.Float32bits(o.Logprob))
		}
	}
	return dst
}

func decodeTokens(payload []byte) (t tokens, err error) {
	if len(payload) < tokensHead {
		return t, fmt.Errorf("tokens frame of %d bytes, want at least %d", len(payload), tokensHead)
	}
	le := binary.LittleEndian
	pos, n, f := le.Uint32(payload[4:]), le.Uint32(payload[8:]), finish(payload[12])
	probs := payload[13] == 1
	end := tokensHead + 4*int(n)
	switch {
	case n == 0 || n > maxTokens || pos > maxContext-n:
		return t, fmt.Errorf("%d tokens at position %d, want 1 to %d of %d", n, pos, maxTokens, maxContext)
	case probs && n > maxProbs:
		return t, fmt.Errorf("%d tokens with log-probabilities, at most %d", n, maxProbs)
	case f > finishLength || payload[13] > 1 || payload[14]|payload[15] != 0:
		return t, fmt.Errorf("tokens with finish word %#x", le.Uint32(payload[12:]))
	case len(payload) < end || len(payload) > end && !probs:
		return t, fmt.Errorf("tokens frame of %d bytes, its count says %d", len(payload), end)
	}
	t = tokens{epoch: le.Uint32(payload), pos: int(pos), finish: f, list: int32s(payload[tokensHead:end])}
	if probs {
		if t.probs, err = decodeProbs(payload[end:], int(n)); err != nil {
			return t, err
		}
	}
	return t, checkTokens(t.list)
}

// decodeProbs reads the log-probabilities of n tokens.
func decodeProbs(b []byte, n int) ([]Prob, error) {
	if len(b) < n*probHead {
		return nil, fmt.Errorf("%d bytes of log-probabilities for %d tokens", len(b), n)
	}
	le := binary.LittleEndian
	list := make([]Prob, n)
	for i := range list {
		if len(b) < probHead {
			return nil, fmt.Errorf("%d bytes of log-probabilities for token %d", len(b), i)
		}
		p, m := &list[i], le.Uint32(b[4:])
		p.Logprob = math.Float32frombits(le.Uint32(b))
		b = b[probHead:]
		if m > MaxTop || len(b) < topSize*int(m) {
			return nil, fmt.Errorf("token %d beside %d others in %d bytes, at most %d", i, m, len(b), MaxTop)
		}
		if m > 0 {
			p.Top = make([]TokenProb, m)
		}
		for j := range p.Top {
			p.Top[j] = TokenProb{int32(le.Uint32(b)), math.Float32frombits(le.Uint32(b[4:]))}
			b = b[topSize:]
		}
		if err := p.check(); err != nil {
			return nil, fmt.Errorf("token %d: %w", i, err)
		}
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("%d bytes behind the log-probabilities", len(b))
	}
	return list, nil
}

func (p *Prob) check() error {
	if !(p.Logprob <= 0) { // NaN too
		return fmt.Errorf("log-probability %v", p.Logprob)
	}
	for _, o := range p.Top {
		if o.Token < 0 || !(o.Logprob <= 0) {
			return fmt.Errorf("log-probability %v of token %d", o.Logprob, o.Token)
		}
	}
	return nil
}

// checkProbs says what is wrong with the log-probabilities of drawn tokens, by what was asked for.
func (s *Sampling) checkProbs(t *tokens) error {
	if (t.probs != nil) != s.Logprobs {
		return fmt.Errorf("drawn tokens with log-probabilities: %v, asked for: %v", t.probs != nil, s.Logprobs)
	}
	for _, p := range t.probs {
		if len(p.Top) > s.Top {
			return fmt.Errorf("a token beside %d others, %d were asked for", len(p.Top), s.Top)
		}
	}
	return nil
}

// sendTokens sends tokens in as many frames as they need.
func sendTokens(l *link, id uint64, t tokens) {
	most := maxTokens
	if t.probs != nil {
		most = maxProbs
	}
	for len(t.list) > most {
		part := tokens{t.epoch, t.pos, running, t.list[:most], nil}
		if t.probs != nil {
			part.probs, t.probs = t.probs[:most], t.probs[most:]
		}
		l.send(frameTokens, id, putTokens(nil, part))
		t.pos, t.list = t.pos+most, t.list[most:]
	}
	l.send(frameTokens, id, putTokens(nil, t))
}

func checkTokens(list []int32) error {
	for i, t := range list {
		if t < 0 {
			return fmt.Errorf("token %d is %d", i, t)
		}
	}
	return nil
}
