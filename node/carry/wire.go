package carry

// The wire format of /kvasir/<net>/gateway/1, version 1.
//
// Frames are those of package p2p: a 16-byte header (payload length, type, flags, id) and a
// payload. Flags and id are 0. Integers are little-endian. A payload has exactly the length that its
// fields say. A stream is one request; closing it ends the request.
//
//	type       from    payload
//	1 ASK      client  CBOR, first frame, at most maxAsk bytes
//	2 PROMPT   client  tokens u32, as many as ASK says; follows ASK
//	3 TAKEN    client  u32: tokens that were read since ASK; at least every wordEvery
//	4 BEGUN    server  empty: the request waits for its turn, or runs
//	5 WAIT     server  empty: it is still there; at least every wordEvery while nothing else is sent
//	6 TOKENS   server  tokens of the prompt that were not computed again u32, then tokens u32, 1 to
//	                   Window; never more than Window beyond what TAKEN said
//	9 LIKELY   server  a token with log-probabilities, where ASK wants them, and then instead of
//	                   TOKENS: tokens of the prompt that were not computed again u32, token u32,
//	                   log-probability f32, n u32 (up to what ASK says), n × (token u32,
//	                   log-probability f32)
//	10 VECTOR  server  f32 × width (1 to maxWidth), the same for all: the vector of the next of ASK's
//	                   inputs, instead of TOKENS
//	7 END      server  finish u8 (1 the model ended it, 2 as long as was asked for), zero u8 × 3
//	8 REFUSED  server  code u16, zero u16, milliseconds after which to come again u32, tokens of
//	                   the prompt u32, tokens that fit u32, UTF-8 text (up to maxText bytes); the
//	                   figures are 0 where the code has none. With CodeLacks the first one is what
//	                   is lacking: 1 grammars, 2 the text of control tokens, 4 log-probabilities.
//	                   Instead of BEGUN, or later
//
// ASK is a deterministic CBOR map with integer keys: 1 version, 2 model id (32 bytes), 3 tokens of
// the prompt (1 to MaxPrompt), 4 most tokens of the answer (0: as many as fit), 5 temperature, 6 top
// k, 7 top p, 8 min p, 9 seed, 10 repeat, 11 frequency and 12 presence penalty, 13 logit bias by
// token (up to maxBias); and in version 2, which no ASK without one of these has, 14 grammar (GBNF,
// up to gateway.MaxGrammar bytes), 15 its triggers (up to maxTriggers of 1 to maxTrigger bytes), 16
// whether the answer has the text of control tokens, 17 whether tokens come with log-probabilities,
// and 18 beside how many others (up to MaxTop). From 4 on a key is left out where its value is zero.
// Decoding refuses any other encoding of the same value, unknown keys and keys given twice. A server
// that speaks version 1 alone refuses version 2 with CodeProtocol.
//
// Version 3 asks for embeddings: 19 is the tokens of each input (1 to MaxInputs, together what 3
// says, at most MaxInputTokens), in the order of PROMPT, and no key from 4 to 18 is there. END says 1.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unicode/utf8"

	"kvasird/ggml/gguf"
	"kvasird/node/gateway"
	"kvasird/p2p"
)

const (
	// Protocol names the protocol, as hosts do.
	Protocol = "gateway/1"
	// Window is how many tokens a server sends ahead of what the client read.
	Window = 256
	// MaxPrompt bounds the tokens of a prompt.
	MaxPrompt = 1 << 20

	// MaxTop bounds the tokens that one is told beside.
	MaxTop = 20

	plainVersion = 1
	extraVersion = 2
	embedVersion = 3
	maxAsk       = 32<<10 + gateway.MaxGrammar
	maxTriggers  = 16
	maxTrigger   = 256 // bytes
	likelyHead   = 16
	topSize      = 8
	maxText      = 1 << 10
	maxBias      = 1024
	refusedHead  = 16
	maxAnswer    = max(4+4*Window, refusedHead+maxText) // bytes of a server's payload
)

const (
	frameAsk uint8 = 1 + iota
	framePrompt
	frameTaken
	frameBegun
	frameWait
	frameTokens
	frameEnd
	frameRefused
	frameLikely
	frameVector
)

// Code says why a server refused or ended a request.
type Code uint16

const (
	CodeProtocol Code = 1 + iota // the protocol was broken
	CodeRights                   // this peer may not infer here
	CodeNotReady                 // the model is not answered for here, or not now
	CodeBusy                     // too many requests, of this peer or in all: later, or elsewhere
	CodeLong                     // the prompt does not fit
	CodeFailed                   // the request was taken and could not be answered
	CodeLacks                    // what answers here cannot serve a wish of the request

	lastCode = CodeLacks
)

var codeNames = [...]string{"", "protocol", "rights", "not ready", "busy", "too long", "failed", "lacks"}

func (c Code) String() string {
	if c > 0 && int(c) < len(codeNames) {
		return codeNames[c]
	}
	return fmt.Sprintf("code %d", uint16(c))
}

// final says whether another server cannot help.
func (c Code) final() bool { return c == CodeRights || c == CodeLong }

// ask is an ASK.
type ask struct {
	Version          uint              `cbor:"1,keyasint"`
	Model            []byte            `cbor:"2,keyasint"`
	Prompt           int               `cbor:"3,keyasint"`
	Most             int               `cbor:"4,keyasint,omitempty"`
	Temperature      float32           `cbor:"5,keyasint,omitempty"`
	TopK             int               `cbor:"6,keyasint,omitempty"`
	TopP             float32           `cbor:"7,keyasint,omitempty"`
	MinP             float32           `cbor:"8,keyasint,omitempty"`
	Seed             uint32            `cbor:"9,keyasint,omitempty"`
	RepeatPenalty    float32           `cbor:"10,keyasint,omitempty"`
	FrequencyPenalty float32           `cbor:"11,keyasint,omitempty"`
	PresencePenalty  float32           `cbor:"12,keyasint,omitempty"`
	LogitBias        map[int32]float32 `cbor:"13,keyasint,omitempty"`
	Grammar          string            `cbor:"14,keyasint,omitempty"`
	Triggers         []string          `cbor:"15,keyasint,omitempty"`
	Special          bool              `cbor:"16,keyasint,omitempty"`
	Logprobs         bool              `cbor:"17,keyasint,omitempty"`
	Top              int               `cbor:"18,keyasint,omitempty"`
	Inputs           []int             `cbor:"19,keyasint,omitempty"`
}

func askOf(model gguf.ModelID, r *gateway.Request, x *gateway.Extra) ask {
	a := ask{
		Model: model[:], Prompt: len(r.Prompt), Most: min(r.MaxTokens, math.MaxInt32), Temperature: r.Temperature,
		TopK: r.TopK, TopP: r.TopP, MinP: r.MinP, Seed: r.Seed, RepeatPenalty: r.RepeatPenalty,
		FrequencyPenalty: r.FrequencyPenalty, PresencePenalty: r.PresencePenalty, LogitBias: r.LogitBias,
		Grammar: x.Grammar, Triggers: x.Triggers, Special: x.Special, Logprobs: x.Logprobs, Top: x.Top,
	}
	a.Version = a.version()
	return a
}

// version is the least that has all that is asked.
func (a *ask) version() uint {
	switch {
	case len(a.Inputs) > 0:
		return embedVersion
	case a.wishes():
		return extraVersion
	}
	return plainVersion
}

// wishes says whether there is something that not all servers know.
func (a *ask) wishes() bool {
	return a.Grammar != "" || len(a.Triggers) > 0 || a.Special || a.Logprobs || a.Top != 0
}

func (a *ask) extra() gateway.Extra {
	return gateway.Extra{Grammar: a.Grammar, Triggers: a.Triggers, Special: a.Special, Logprobs: a.Logprobs, Top: a.Top}
}

// request is what is asked, but for the prompt.
func (a *ask) request() gateway.Request {
	return gateway.Request{
		MaxTokens: a.Most, Temperature: a.Temperature, TopK: a.TopK, TopP: a.TopP, MinP: a.MinP, Seed: a.Seed,
		RepeatPenalty: a.RepeatPenalty, FrequencyPenalty: a.FrequencyPenalty, PresencePenalty: a.PresencePenalty, LogitBias: a.LogitBias,
	}
}

var encodeControl, decodeControl = p2p.ControlCodec(maxAsk, MaxInputs, maxBias)

// encode refuses what decodeAsk refuses.
func (a *ask) encode() ([]byte, error) {
	if err := a.check(); err != nil {
		return nil, err
	}
	return encodeControl(a), nil
}

func decodeAsk(payload []byte) (a ask, err error) {
	if err := decodeControl(payload, &a); err != nil {
		return a, fmt.Errorf("ask: %w", err)
	}
	return a, a.check()
}

func (a *ask) check() error {
	switch {
	case a.Version < plainVersion || a.Version > embedVersion:
		return fmt.Errorf("ask of version %d, this side speaks %d to %d", a.Version, plainVersion, embedVersion)
	case a.Version != a.version():
		return fmt.Errorf("ask of version %d with what belongs to version %d", a.Version, a.version())
	case len(a.Model) != len(gguf.ModelID{}):
		return fmt.Errorf("model id of %d bytes, want %d", len(a.Model), len(gguf.ModelID{}))
	case a.Prompt < 1 || a.Prompt > MaxPrompt:
		return fmt.Errorf("prompt of %d tokens, want 1 to %d", a.Prompt, MaxPrompt)
	case a.Most < 0 || a.Most > math.MaxInt32 || a.TopK < 0 || a.TopK > math.MaxInt32:
		return fmt.Errorf("answer of %d tokens, top_k %d: neither may be negative, nor above %d", a.Most, a.TopK, math.MaxInt32)
	case len(a.LogitBias) > maxBias:
		return fmt.Errorf("%d logit biases, at most %d", len(a.LogitBias), maxBias)
	}
	for _, f := range []struct {
		name  string
		value float32
		least float32
	}{
		{"temperature", a.Temperature, 0}, {"top_p", a.TopP, 0}, {"min_p", a.MinP, 0}, {"repeat penalty", a.RepeatPenalty, 0},
		{"frequency penalty", a.FrequencyPenalty, -math.MaxFloat32}, {"presence penalty", a.PresencePenalty, -math.MaxFloat32},
	} {
		if !(f.value >= f.least && f.value <= math.MaxFloat32) { // NaN too
			return fmt.Errorf("%s is %v", f.name, f.value)
		}
	}
	for t, b := range a.LogitBias {
		if t < 0 || b != b {
			return fmt.Errorf("logit bias %v of token %d", b, t)
		}
	}
	if len(a.Inputs) > 0 {
		return a.checkInputs()
	}
	return a.checkExtra()
}

func (a *ask) checkInputs() error {
	plain := ask{Version: a.Version, Model: a.Model, Prompt: a.Prompt, Inputs: a.Inputs}
	if !bytes.Equal(encodeControl(a), encodeControl(&plain)) {
		return errors.New("ask for embeddings with settings of an answer")
	}
	sum := 0
	for i, n := range a.Inputs {
		if n < 1 || n > MaxInputTokens {
			return fmt.Errorf("input %d of %d tokens, want 1 to %d", i, n, MaxInputTokens)
		}
		sum += n
	}
	if len(a.Inputs) > MaxInputs || sum != a.Prompt || sum > MaxInputTokens {
		return fmt.Errorf("%d inputs of %d tokens, %d were told, at most %d of %d", len(a.Inputs), sum, a.Prompt, MaxInputs, MaxInputTokens)
	}
	return nil
}

func (a *ask) checkExtra() error {
	switch {
	case len(a.Grammar) > gateway.MaxGrammar || !utf8.ValidString(a.Grammar):
		return fmt.Errorf("grammar of %d bytes, want at most %d of text", len(a.Grammar), gateway.MaxGrammar)
	case len(a.Triggers) > maxTriggers || len(a.Triggers) > 0 && a.Grammar == "":
		return fmt.Errorf("%d triggers of a grammar of %d bytes, at most %d and none without a grammar", len(a.Triggers), len(a.Grammar), maxTriggers)
	case a.Top < 0 || a.Top > MaxTop || a.Top > 0 && !a.Logprobs:
		return fmt.Errorf("%d tokens beside each, at most %d, and with log-probabilities only", a.Top, MaxTop)
	}
	for _, t := range a.Triggers {
		if t == "" || len(t) > maxTrigger || !utf8.ValidString(t) {
			return fmt.Errorf("trigger %.32q, want 1 to %d bytes of text", t, maxTrigger)
		}
	}
	return nil
}

// decodeTokens reads tokens up to a vocabulary; 0: any.
func decodeTokens(payload []byte, vocab int) ([]int32, error) {
	if len(payload) == 0 || len(payload)%4 != 0 {
		return nil, fmt.Errorf("%d bytes of tokens, want a multiple of 4", len(payload))
	}
	list := make([]int32, len(payload)/4)
	for i := range list {
		list[i] = int32(binary.LittleEndian.Uint32(payload[4*i:]))
		if list[i] < 0 || vocab > 0 && int(list[i]) >= vocab {
			return nil, fmt.Errorf("token %d is %d, the vocabulary has %d", i, list[i], vocab)
		}
	}
	return list, nil
}

func decodeTaken(payload []byte) (uint32, error) {
	if len(payload) != 4 {
		return 0, fmt.Errorf("taken frame of %d bytes, want 4", len(payload))
	}
	return binary.LittleEndian.Uint32(payload), nil
}

func putAnswer(dst []byte, cached int, list ...int32) []byte {
	return p2p.AppendInts(binary.LittleEndian.AppendUint32(dst, uint32(cached)), list)
}

func decodeAnswer(payload []byte, vocab int) (cached int, list []int32, err error) {
	if len(payload) < 8 || len(payload) > 4+4*Window {
		return 0, nil, fmt.Errorf("tokens frame of %d bytes, want 8 to %d", len(payload), 4+4*Window)
	}
	n := binary.LittleEndian.Uint32(payload)
	if n > MaxPrompt {
		return 0, nil, fmt.Errorf("%d tokens were not computed again, at most %d can be", n, MaxPrompt)
	}
	list, err = decodeTokens(payload[4:], vocab)
	return int(n), list, err
}

// finishes are the reasons to finish, as the wire counts them.
var finishes = [...]string{"", "stop", "length"}

func putEnd(finish string) []byte {
	n := byte(1)
	if finish == finishes[2] {
		n = 2
	}
	return []byte{n, 0, 0, 0}
}

func decodeEnd(payload []byte) (string, error) {
	if len(payload) != 4 || payload[0] == 0 || int(payload[0]) >= len(finishes) || payload[1]|payload[2]|payload[3] != 0 {
		return "", fmt.Errorf("end frame % x is malformed", payload[:min(len(payload), 8)])
	}
	return finishes[payload[0]], nil
}
