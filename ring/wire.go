package ring

// The wire format of /kvasir/<net>/ring/1, version 4. Version 1 had neither a grammar in OPEN nor
// log-probabilities in TOKENS, version 2 no entry in OPEN, version 3 no error 15.
//
// Frames are those of package p2p: a 16-byte header (payload length, type, flags, id) and a
// payload. Flags are 0. Integers and floats are little-endian. A payload has exactly the length
// that its fields say: trailing bytes are refused, and so is a length above MaxFrame, before
// anything is allocated for it.
//
// A link is opened by the predecessor ("fore" below), which is a stage or an entry, and accepted
// by the stage that follows ("aft"). One link carries all sessions that go this way. The id of a
// frame is that of its session, or 0 where the frame speaks of the link.
//
//	type       from   id       payload
//	1 HELLO    fore   0        CBOR, first frame
//	2 WELCOME  aft    0        CBOR, answers HELLO
//	3 OPEN     fore   session  CBOR: opens the session, or opens it again with a higher epoch
//	4 RESUME   aft    session  answers OPEN: epoch u32, positions that aft has u32, rows that may
//	                           be sent u32, n u32, the tokens of the last n of these positions
//	5 ROWS     fore   0        see below
//	6 TOKENS   both   session  epoch u32, first position u32, n u32, finish u8, probs u8, zero
//	                           u8 × 2, n tokens u32. From an entry: the prompt, and on a repair
//	                           the answer so far. From the last stage, fore of the first, and
//	                           from the first to the entry: drawn tokens. Finish is that of the
//	                           last token: 0 goes on, 1 the model ended it, 2 as long as was
//	                           asked for. Probs is 1 where the sampling asks for them and the
//	                           tokens are drawn, then for each token follow: log-probability
//	                           f32, m u32 (up to what was asked for), m × (token u32,
//	                           log-probability f32)
//	7 CREDIT   aft    session  epoch u32, zero u32, rows taken since OPEN u64: so many more than
//	                           RESUME said may have been sent
//	8 READY    aft    session  epoch u32: the ring is closed. To the entry, from the first stage
//	9 ERROR    aft    session  epoch u32, code u16, hop u16 (the stage that is meant by its place in
//	                           the chain), UTF-8 text (up to maxText bytes). Passed back to the entry
//	                  0        the same with epoch 0, hop 0: the link is refused or ends
//	10 CLOSE   both   session  epoch u32, flags u32 (1 = only here, 0 = to be passed on), key
//	11 PING    fore   any      empty
//	12 PONG    aft    of PING  empty
//	13 DRAIN   aft    0        empty: aft will leave. It serves what it has; go elsewhere
//
//	ROWS   0  segments u16, precision u8 (1 f32, 2 f16), zero u8
//	       4  row width u32, elements
//	       8  per segment: session u64, epoch u32, first position u32, rows u32, zero u32
//	          token of each row, u32
//	          flags of each row, u8: 1 a token is to be drawn after it, 2 its token is a draft
//	          zero bytes up to a multiple of 4
//	          rows, raw
//
// HELLO, WELCOME and OPEN are deterministic CBOR maps with integer keys; decoding refuses any
// other encoding of the same value, unknown keys and keys given twice.
//
//	HELLO    1 wire version, 2 runtime pack, 3 model id, 4 layers of the model, 5 first layer and
//	         6 end of the window that is asked for, 7 row width (0: an entry, sends no rows),
//	         8 precision of the rows that fore will send
//	WELCOME  1 wire version, 2 row width
//	OPEN     1 epoch (above 0), 2 key (16 bytes), 3 chain [[peer, first layer, end]…], 4 hop: the
//	         place of aft in the chain; the number of stages: aft is the first one, the ring is
//	         closed, 5 tokens of the prompt, 6 most tokens of the answer, 7 tokens known to the
//	         entry, 8 whether all stages so far can drop drafts, 9 sampling (see Sampling; a key
//	         is left out where its value is zero), 10 the entry's peer id: the first stage knows
//	         it by its link and says it on; from an entry it is left out
//
// A session's id and key are random and chosen by the entry; whoever opens it again must know
// both. ROWS and TOKENS of an epoch that is over are passed over.

import (
	"encoding/binary"
	"fmt"
	"unicode/utf8"

	"kvasird/ggml/gguf"
	"kvasird/p2p"
)

const (
	wireVersion = 4

	// MaxFrame bounds the payload of every frame, in bytes.
	MaxFrame = 8 << 20
	// MaxWidth bounds the elements of a row.
	MaxWidth = 1 << 16

	maxText    = 1 << 10
	maxControl = 64 << 10
	maxOpening = maxControl + MaxGrammar
	maxTail    = 2 * MaxDraft // tokens in a RESUME
	maxTokens  = 1 << 18      // tokens in a TOKENS
	maxProbs   = 1 << 14      // likewise, where they have log-probabilities
	keySize    = 16

	resumeHead = 16
	tokensHead = 16
	probHead   = 8
	topSize    = 8
)

const (
	frameHello uint8 = 1 + iota
	frameWelcome
	frameOpen
	frameResume
	frameRows
	frameTokens
	frameCredit
	frameReady
	frameError
	frameClose
	framePing
	framePong
	frameDrain
)

// Finish reasons on the wire.
type finish uint8

const (
	running finish = iota
	finishStop
	finishLength
)

func (f finish) String() string { return [...]string{"", "stop", "length"}[f] }

type hello struct {
	Version   uint      `cbor:"1,keyasint"`
	Pack      string    `cbor:"2,keyasint"`
	Model     string    `cbor:"3,keyasint"`
	Total     int       `cbor:"4,keyasint"`
	Begin     int       `cbor:"5,keyasint"`
	End       int       `cbor:"6,keyasint"`
	Width     int       `cbor:"7,keyasint"`
	Precision Precision `cbor:"8,keyasint"`
}

type welcome struct {
	Version uint `cbor:"1,keyasint"`
	Width   int  `cbor:"2,keyasint"`
}

type wireHop struct {
	_          struct{} `cbor:",toarray"`
	Peer       string
	Begin, End int
}

// opening is an OPEN.
type opening struct {
	Epoch    uint32    `cbor:"1,keyasint"`
	Key      []byte    `cbor:"2,keyasint"`
	Hops     []wireHop `cbor:"3,keyasint"`
	Hop      int       `cbor:"4,keyasint"`
	Prompt   int       `cbor:"5,keyasint"`
	Most     int       `cbor:"6,keyasint"`
	Known    int       `cbor:"7,keyasint"`
	Drafts   bool      `cbor:"8,keyasint"`
	Sampling Sampling  `cbor:"9,keyasint"`
	Entry    string    `cbor:"10,keyasint,omitempty"`

	chain Chain // Hops
}

func (o *opening) setChain(c Chain) {
	o.chain, o.Hops = c, make([]wireHop, len(c))
	for i, h := range c {
		o.Hops[i] = wireHop{Peer: h.Peer, Begin: h.Layers.Begin, End: h.Layers.End}
	}
}

var (
	encodeControl, decodeControl = p2p.ControlCodec(maxControl, MaxHops, maxBias)
	_, decodeOpeningRecord       = p2p.ControlCodec(maxOpening, MaxHops, maxBias)
)

func decodeHello(payload []byte) (h hello, err error) {
	if err := decodeControl(payload, &h); err != nil {
		return h, fmt.Errorf("hello: %w", err)
	}
	switch {
	case h.Version != wireVersion:
		return h, fmt.Errorf("hello: wire version %d, this side speaks %d", h.Version, wireVersion)
	case h.Total < 1 || h.Total > maxLayers || h.Begin < 0 || h.Begin >= h.End || h.End > h.Total:
		return h, fmt.Errorf("hello: layers %d:%d of %d", h.Begin, h.End, h.Total)
	case h.Width < 0 || h.Width > MaxWidth:
		return h, fmt.Errorf("hello: rows of %d elements, at most %d", h.Width, MaxWidth)
	case h.Precision != F32 && h.Precision != F16:
		return h, fmt.Errorf("hello: precision %d is not known", h.Precision)
	}
	if err := checkNames(h.Model, h.Pack); err != nil {
		return h, fmt.Errorf("hello: %w", err)
	}
	return h, nil
}

func (h *hello) layers() gguf.Range { return gguf.Range{Begin: h.Begin, End: h.End} }

func decodeWelcome(payload []byte) (w welcome, err error) {
	if err := decodeControl(payload, &w); err != nil {
		return w, fmt.Errorf("welcome: %w", err)
	}
	if w.Version != wireVersion {
		return w, fmt.Errorf("welcome: wire version %d, this side speaks %d", w.Version, wireVersion)
	}
	if w.Width < 1 || w.Width > MaxWidth {
		return w, fmt.Errorf("welcome: rows of %d elements, want 1 to %d", w.Width, MaxWidth)
	}
	return w, nil
}

func decodeOpening(payload []byte) (o opening, err error) {
	if err := decodeOpeningRecord(payload, &o); err != nil {
		return o, fmt.Errorf("open: %w", err)
	}
	if o.Epoch == 0 || len(o.Key) != keySize {
		return o, fmt.Errorf("open: epoch %d with a key of %d bytes, want above 0 and %d", o.Epoch, len(o.Key), keySize)
	}
	o.chain = make(Chain, len(o.Hops))
	for i, h := range o.Hops {
		o.chain[i] = Hop{h.Peer, gguf.Range{Begin: h.Begin, End: h.End}}
	}
	if err := o.chain.validate(); err != nil {
		return o, fmt.Errorf("open: %w", err)
	}
	if o.Hop < 0 || o.Hop > len(o.chain) {
		return o, fmt.Errorf("open: hop %d of %d", o.Hop, len(o.chain))
	}
	if len(o.Entry) > maxPeerID || !utf8.ValidString(o.Entry) || (o.Hop == 0) != (o.Entry == "") {
		return o, fmt.Errorf("open: hop %d with entry %.32q: want 1 to %d bytes of text, and none for the first stage", o.Hop, o.Entry, maxPeerID)
	}
	// No overflow: each is checked alone first.
	for _, n := range []int{o.Prompt, o.Most, o.Known} {
		if n < 1 || n > maxContext {
			return o, fmt.Errorf("open: prompt of %d tokens, answer of %d, %d known: want 1 to %d", o.Prompt, o.Most, o.Known, maxContext)
		}
	}
	if o.Known < o.Prompt || o.Known > o.Prompt+o.Most || o.Prompt+o.Most > maxContext {
		return o, fmt.Errorf("open: prompt of %d tokens, answer of %d, %d known", o.Prompt, o.Most, o.Known)
	}
	if err := o.Sampling.validate(); err != nil {
		return o, fmt.Errorf("open: %w", err)
	}
	return o, nil
}

// resume is a RESUME.
type resume struct {
	epoch        uint32
	have, credit int
	tail         []int32 // a view of the payload
}

func putResume(dst []byte, r resume) []byte {
	le := binary.LittleEndian
	dst = le.AppendUint32(dst, r.epoch)
	dst = le.AppendUint32(dst, uint32(r.have))
	dst = le.AppendUint32(dst, uint32(r.credit))
	dst = le.AppendUint32(dst, uint32(len(r.tail)))
	return p2p.AppendInts(dst, r.tail)
}

func decodeResume(payload []byte) (r resume, err error) {
	if len(payload) < resumeHead {
		return r, fmt.Errorf("resume of %d bytes, want at least %d", len(payload), resumeHead)
	}
	le := binary.LittleEndian
	have, credit, n := le.Uint32(payload[4:]), le.Uint32(payload[8:]), le.Uint32(payload[12:])
	switch {
	case have > maxContext || credit > maxContext:
		return r, fmt.Errorf("resume at position %d with credit for %d rows, at most %d", have, credit, maxContext)
	case n > maxTail || n > have:
		return r, fmt.Errorf("resume at position %d with %d tokens, at most %d", have, n, maxTail)
	case len(payload) != resumeHead+4*int(n):
		return r, fmt.Errorf("resume of %d bytes, its counts say %d", len(payload), resumeHead+4*n)
	}
	return resume{le.Uint32(payload), int(have), int(credit), int32s(payload[resumeHead:])}, nil
}

func putCredit(dst []byte, epoch uint32, taken uint64) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, epoch)
	dst = binary.LittleEndian.AppendUint32(dst, 0)
	return binary.LittleEndian.AppendUint64(dst, taken)
}

func decodeCredit(payload []byte) (epoch uint32, taken uint64, err error) {
	if len(payload) != 16 || binary.LittleEndian.Uint32(payload[4:]) != 0 {
		return 0, 0, fmt.Errorf("credit frame of %d bytes is malformed", len(payload))
	}
	return binary.LittleEndian.Uint32(payload), binary.LittleEndian.Uint64(payload[8:]), nil
}

func putReady(dst []byte, epoch uint32) []byte { return binary.LittleEndian.AppendUint32(dst, epoch) }

func decodeReady(payload []byte) (epoch uint32, err error) {
	if len(payload) != 4 {
		return 0, fmt.Errorf("ready frame of %d bytes, want 4", len(payload))
	}
	return binary.LittleEndian.Uint32(payload), nil
}

const closeHere = 1 // flag of CLOSE

// closing is a CLOSE.
type closing struct {
	epoch uint32
	here  bool
	key   []byte // a view of the payload
}

func putClose(dst []byte, c closing) []byte {
	flags := uint32(0)
	if c.here {
		flags = closeHere
	}
	dst = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(dst, c.epoch), flags)
	return append(dst, c.key...)
}

func decodeClose(payload []byte) (c closing, err error) {
	if len(payload) != 8+keySize || binary.LittleEndian.Uint32(payload[4:]) > closeHere {
		return c, fmt.Errorf("close frame of %d bytes is malformed", len(payload))
	}
	return closing{binary.LittleEndian.Uint32(payload), payload[4] == closeHere, payload[8:]}, nil
}

// report is an ERROR of a session, or with epoch 0 of a link.
type report struct {
	epoch uint32
	code  Code
	hop   int
	text  string
}

func putReport(dst []byte, r report) []byte {
	text := r.text[:min(len(r.text), maxText)]
	for !utf8.ValidString(text) && len(text) > 0 { // cut inside a rune
		text = text[:len(text)-1]
	}
	dst = binary.LittleEndian.AppendUint32(dst, r.epoch)
	dst = binary.LittleEndian.AppendUint16(dst, uint16(r.code))
	dst = binary.LittleEndian.AppendUint16(dst, uint16(r.hop))
	return append(dst, text...)
}

func decodeReport(payload []byte) (r report, err error) {
	if len(payload) < 8 || len(payload) > 8+maxText {
		return r, fmt.Errorf("error frame of %d bytes, want 8 to %d", len(payload), 8+maxText)
	}
	le := binary.LittleEndian
	r = report{le.Uint32(payload), Code(le.Uint16(payload[4:])), int(le.Uint16(payload[6:])), string(payload[8:])}
	if r.code == 0 || r.code > lastCode || r.hop > MaxHops || !utf8.ValidString(r.text) {
		return r, fmt.Errorf("error frame with code %d, hop %d is malformed", r.code, r.hop)
	}
	return r, nil
}
