package p2p

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// A frame on a stream or lane, little-endian:
//
//	offset  size  field
//	0       4     payload length in bytes, at most the maximum that both sides set
//	4       1     type, given meaning by the protocol
//	5       1     flags, likewise
//	6       2     reserved, 0; anything else is refused
//	8       8     request id
//	16      n     payload
//
// Frames follow each other without padding. A stream ends between two frames or the
// last one is broken off: io.ErrUnexpectedEOF.
const (
	// FrameHeader is the size of a frame's header in bytes.
	FrameHeader = 16

	// frameStep bounds the memory taken on the strength of a header alone: a longer
	// payload gets more only as its bytes arrive.
	frameStep = 1 << 20
)

var (
	// ErrFrameTooLarge says that a payload exceeds the maximum of the reader or writer.
	ErrFrameTooLarge = errors.New("frame too large")
	// ErrFrame says that a header is not one of this format.
	ErrFrame = errors.New("malformed frame")
)

// Frame is one message of a data protocol.
type Frame struct {
	Type    uint8
	Flags   uint8
	ID      uint64 // request id
	Payload []byte
}

// FrameReader reads frames. It keeps one buffer as large as the largest payload seen.
type FrameReader struct {
	r   io.Reader
	max int
	hdr [FrameHeader]byte
	buf []byte
}

// NewFrameReader reads frames of at most maxPayload bytes from r.
func NewFrameReader(r io.Reader, maxPayload int) *FrameReader {
	return &FrameReader{r: r, max: maxPayload}
}

// Next returns the next frame. Its payload is valid until the following call. The error
// is io.EOF when the stream ended between frames, io.ErrUnexpectedEOF within one,
// ErrFrameTooLarge, ErrFrame, or the reader's. After an error the stream is of no use.
func (f *FrameReader) Next() (Frame, error) { return f.NextInto(nil) }

// NextInto is Next, but reads a payload that fits into dst there. What else was in dst may
// be lost, after an error too.
func (f *FrameReader) NextInto(dst []byte) (Frame, error) {
	if _, err := io.ReadFull(f.r, f.hdr[:]); err != nil {
		return Frame{}, err
	}
	if reserved := binary.LittleEndian.Uint16(f.hdr[6:]); reserved != 0 {
		return Frame{}, fmt.Errorf("%w: reserved field is %#x, want 0", ErrFrame, reserved)
	}
	n := binary.LittleEndian.Uint32(f.hdr[0:])
	if uint64(n) > uint64(f.max) {
		return Frame{}, fmt.Errorf("%w: payload of %d bytes, maximum %d", ErrFrameTooLarge, n, f.max)
	}
	payload := dst[:min(int(n), len(dst))]
	var err error
	if len(payload) == int(n) {
		err = readWhole(f.r, payload)
	} else {
		payload, err = f.payload(int(n))
	}
	if err != nil {
		return Frame{}, err
	}
	return Frame{
		Type: f.hdr[4], Flags: f.hdr[5],
		ID: binary.LittleEndian.Uint64(f.hdr[8:]), Payload: payload,
	}, nil
}

// payload reads n bytes, growing the buffer no faster than they arrive.
func (f *FrameReader) payload(n int) ([]byte, error) {
	for have := 0; have < n; {
		if have == len(f.buf) {
			grown := make([]byte, min(n, max(2*len(f.buf), frameStep)))
			copy(grown, f.buf)
			f.buf = grown
		}
		end := min(n, len(f.buf))
		if err := readWhole(f.r, f.buf[have:end]); err != nil {
			return nil, err
		}
		have = end
	}
	return f.buf[:n], nil
}

// readWhole fills b with what is within a frame.
func readWhole(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// FrameWriter writes frames, header and payload in one Write, from one buffer that it
// keeps as large as the largest payload sent.
type FrameWriter struct {
	w   io.Writer
	max int
	buf []byte // header, then payload
}

// NewFrameWriter writes frames of at most maxPayload bytes to w.
func NewFrameWriter(w io.Writer, maxPayload int) *FrameWriter {
	return &FrameWriter{w: w, max: maxPayload, buf: make([]byte, FrameHeader)}
}

// Payload returns the n bytes that the next Send will carry, to be filled in place. Their
// content is unspecified. They belong to the writer and are valid until Send.
func (f *FrameWriter) Payload(n int) ([]byte, error) {
	if n < 0 || n > f.max {
		return nil, fmt.Errorf("%w: payload of %d bytes, maximum %d", ErrFrameTooLarge, n, f.max)
	}
	if total := FrameHeader + n; total <= cap(f.buf) {
		f.buf = f.buf[:total]
	} else {
		f.buf = make([]byte, total)
	}
	return f.buf[FrameHeader:], nil
}

// Send writes a frame with the payload last returned by Payload.
func (f *FrameWriter) Send(typ, flags uint8, id uint64) error {
	binary.LittleEndian.PutUint32(f.buf[0:], uint32(len(f.buf)-FrameHeader))
	f.buf[4], f.buf[5], f.buf[6], f.buf[7] = typ, flags, 0, 0
	binary.LittleEndian.PutUint64(f.buf[8:], id)
	_, err := f.w.Write(f.buf)
	f.buf = f.buf[:FrameHeader]
	return err
}

// Write sends fr, copying its payload.
func (f *FrameWriter) Write(fr Frame) error {
	payload, err := f.Payload(len(fr.Payload))
	if err != nil {
		return err
	}
	copy(payload, fr.Payload)
	return f.Send(fr.Type, fr.Flags, fr.ID)
}

// AppendInts appends a list to a payload, little-endian.
func AppendInts(dst []byte, list []int32) []byte {
	for _, n := range list {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(n))
	}
	return dst
}
