package fetch

// The wire format of fetch/1, version 1.
//
// Frames are those of package p2p: a 16-byte header (payload length, type, flags, request
// id) and a payload. Integers are little-endian. Flags are 0 where nothing else is said. A
// payload has exactly the length that its fields say.
//
//	type        from       id       payload
//	1 WANT      requester  0        version u32, model id 32 bytes: first frame of a session
//	2 MANIFEST  server     0        answers WANT: root 32 bytes and size u64 of every file,
//	                                1 to maxFiles, each of 1 to maxFileSize bytes
//	3 ASK HELD  requester  request  file u32, 0 u32, first group u64
//	4 HELD      server     request  see below
//	5 ASK TREE  requester  request  file u32, length u32 (1 to MaxRange), offset u64
//	6 ASK DATA  requester  request  likewise; whole groups, the file's last may be short
//	7 PIECE     server     request  1 to maxPiece bytes of the range, maxSharedPiece on a
//	                                stream that shares its connection; flag 1: the last of it
//	8 ERROR     server     request  code u16, 0 u16, UTF-8 text (up to maxText bytes). Id 0:
//	                                the session ends
//	9 CANCEL    requester  request  empty: the range is not wanted any more
//
// A session is about one model. A request id is not 0 and not that of a request in flight.
// Requests are answered one after the other in the order in which they were sent, each by
// HELD, by pieces that are its range in order, or by ERROR. A cancelled request that is not
// complete yet ends with ERROR, code cancelled; CANCEL of another is ignored.
//
//	HELD   0  next group u64: where to ask on, 0 at the end of the file
//	       8  spans, at most maxHeldSpans: groups left out since the span before (or since
//	          the first group asked for), groups held, each an unsigned varint of the
//	          shortest form. Spans do not touch, lie within the file, and before next
//
// The payloads of a requester are at most maxAsk bytes, those of a server at most maxPiece.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf8"
)

const (
	// Protocol is the name under which a host serves fetch.
	Protocol = "fetch/1"
	// Group is the number of bytes that are verified together.
	Group = 256 << 10
	// MaxRange bounds the bytes of one request.
	MaxRange = 4 << 20

	wireVersion = 1

	maxPiece       = 1 << 20
	maxSharedPiece = 64 << 10
	maxFiles       = 1024
	maxFileSize    = 1 << 44
	maxHeldSpans   = 4096 // of a frame
	maxText        = 512
	maxAsk         = 64

	wantSize = 4 + 32
	fileSize = 32 + 8
	askSize  = 16
	heldHead = 8
)

const (
	frameWant uint8 = 1 + iota
	frameManifest
	frameAskHeld
	frameHeld
	frameAskTree
	frameAskData
	framePiece
	frameError
	frameCancel
)

const flagLast = 1

// code says why a request or a session ended.
type code uint16

const (
	codeMalformed code = 1 + iota
	codeVersion
	codeNoModel
	codeNotHeld
	codeBusy
	codeCancelled
	codeInternal
)

var (
	// ErrMalformed says that a peer broke the protocol.
	ErrMalformed = errors.New("malformed message")

	errVersion = errors.New("unknown version of the protocol")
)

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}

func encodeWant(model [32]byte) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, wireVersion), model[:]...)
}

func decodeWant(b []byte) (model [32]byte, err error) {
	if len(b) < 4 {
		return model, malformed("want of %d bytes", len(b))
	}
	if v := binary.LittleEndian.Uint32(b); v != wireVersion {
		return model, fmt.Errorf("%w: %d, this node speaks %d", errVersion, v, wireVersion)
	}
	if len(b) != wantSize {
		return model, malformed("want of %d bytes", len(b))
	}
	return [32]byte(b[4:]), nil
}

func encodeManifest(files []File) []byte {
	b := make([]byte, 0, len(files)*fileSize)
	for _, f := range files {
		b = append(b, f.Root[:]...)
		b = binary.LittleEndian.AppendUint64(b, uint64(f.Size))
	}
	return b
}

func decodeManifest(b []byte) ([]File, error) {
	if len(b) == 0 || len(b)%fileSize != 0 || len(b) > maxFiles*fileSize {
		return nil, malformed("manifest of %d bytes", len(b))
	}
	files := make([]File, 0, len(b)/fileSize)
	for ; len(b) > 0; b = b[fileSize:] {
		size := binary.LittleEndian.Uint64(b[32:])
		if size == 0 || size > maxFileSize {
			return nil, malformed("file of %d bytes in a manifest", size)
		}
		files = append(files, File{Root: [32]byte(b[:32]), Size: int64(size)})
	}
	return files, nil
}

// ask is a request for a range, or for what is held from a group on.
type ask struct {
	file   uint32
	length uint32 // 0 for what is held
	off    uint64 // of a byte; for what is held: of a group
}

func (a ask) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, a.file)
	b = binary.LittleEndian.AppendUint32(b, a.length)
	return binary.LittleEndian.AppendUint64(b, a.off)
}

// decodeAsk reads the payload of a frame of type typ. Whether file and range exist is for
// the caller to see.
func decodeAsk(typ uint8, b []byte) (ask, error) {
	if len(b) != askSize {
		return ask{}, malformed("request of %d bytes", len(b))
	}
	a := ask{
		file: binary.LittleEndian.Uint32(b), length: binary.LittleEndian.Uint32(b[4:]),
		off: binary.LittleEndian.Uint64(b[8:]),
	}
	switch {
	case typ == frameAskHeld && a.length != 0:
		return ask{}, malformed("request for what is held has a length")
	case typ != frameAskHeld && (a.length == 0 || a.length > MaxRange):
		return ask{}, malformed("request for %d bytes", a.length)
	case a.off > maxFileSize:
		return ask{}, malformed("request from %d on", a.off)
	case typ == frameAskData && a.off%Group != 0:
		return ask{}, malformed("request from %d on, within a group", a.off)
	}
	return a, nil
}

// groupsOf is the number of groups of a file of size bytes.
func groupsOf(size int64) uint64 { return uint64(size+Group-1) / Group }

// encodeHeld tells which whole groups from group from on are in held, spans of a file of
// size bytes, as far as fits in a frame.
func encodeHeld(held []Span, size int64, from uint64) []byte {
	b := binary.LittleEndian.AppendUint64(nil, 0)
	at, count := from, 0
	for _, s := range held {
		first, end := uint64(s.Off+Group-1)/Group, uint64(s.End())/Group
		if s.End() == size {
			end = groupsOf(size)
		}
		first = max(first, from)
		if first >= end {
			continue
		}
		if count == maxHeldSpans {
			binary.LittleEndian.PutUint64(b, at)
			break
		}
		b = binary.AppendUvarint(b, first-at)
		b = binary.AppendUvarint(b, end-first)
		at = end
		count++
	}
	return b
}

// decodeHeld reads what is held of a file of size bytes from group from on, in bytes, and
// the group from which to ask on, 0 at the end.
func decodeHeld(b []byte, size int64, from uint64) (spans []Span, next uint64, err error) {
	if len(b) < heldHead {
		return nil, 0, malformed("held of %d bytes", len(b))
	}
	next, b = binary.LittleEndian.Uint64(b), b[heldHead:]
	groups := groupsOf(size)
	limit := groups
	if next != 0 {
		limit = next
	}
	if limit > groups || next != 0 && next <= from {
		return nil, 0, malformed("held asks on from group %d of %d, after %d", next, groups, from)
	}
	for at := from; len(b) > 0; {
		gap, n := shortUvarint(b)
		count, m := shortUvarint(b[n:])
		if n == 0 || m == 0 {
			return nil, 0, malformed("held has a number that is cut off or padded")
		}
		b = b[n+m:]
		if len(spans) == maxHeldSpans || count == 0 || gap == 0 && len(spans) > 0 {
			return nil, 0, malformed("held has too many spans, an empty one, or two that touch")
		}
		if at > limit || gap > limit-at || count > limit-at-gap {
			return nil, 0, malformed("held beyond group %d", limit)
		}
		first := int64(at + gap)
		at += gap + count
		spans = append(spans, Span{first * Group, min(int64(at)*Group, size) - first*Group})
	}
	return spans, next, nil
}

// shortUvarint reads an unsigned varint in its shortest form; n is 0 when there is none.
func shortUvarint(b []byte) (v uint64, n int) {
	v, n = binary.Uvarint(b)
	if n <= 0 || n > 1 && b[n-1] == 0 {
		return 0, 0
	}
	return v, n
}

// refusal is the payload of ERROR.
type refusal struct {
	code code
	text string
}

func (r refusal) Error() string { return fmt.Sprintf("refused by the source: %q", r.text) }

func (r refusal) encode() []byte {
	text := r.text
	for len(text) > maxText || !utf8.ValidString(text) {
		text = text[:min(maxText, len(text)-1)]
	}
	b := binary.LittleEndian.AppendUint16(nil, uint16(r.code))
	return append(append(b, 0, 0), text...)
}

func decodeRefusal(b []byte) (refusal, error) {
	if len(b) < 4 || len(b) > 4+maxText || b[2] != 0 || b[3] != 0 || !utf8.Valid(b[4:]) {
		return refusal{}, malformed("error of %d bytes", len(b))
	}
	r := refusal{code(binary.LittleEndian.Uint16(b)), string(b[4:])}
	if r.code < codeMalformed || r.code > codeInternal {
		return refusal{}, malformed("error has the code %d", r.code)
	}
	return r, nil
}
