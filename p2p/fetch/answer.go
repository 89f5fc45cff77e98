package fetch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"kvasird/p2p"
)

// answer serves the queue until it is closed or the requester can not be reached.
func (ses *session) answer(ctx context.Context, queue <-chan *request) error {
	for r := range queue {
		var err error
		switch r.typ {
		case frameError:
			return ses.send(p2p.Frame{Type: frameError, Payload: r.refusal.encode()})
		case frameAskHeld:
			err = ses.sendHeld(ctx, r)
		case frameAskTree:
			err = ses.sendTree(ctx, r)
		case frameAskData:
			err = ses.sendData(ctx, r)
		}
		var no refusal
		if errors.As(err, &no) {
			err = ses.send(p2p.Frame{Type: frameError, ID: r.id, Payload: no.encode()})
		}
		if err != nil {
			return err
		}
		ses.done(r)
	}
	return nil
}

// refuse counts a request that is refused and returns what to tell.
func (ses *session) refuse(c code, reason, format string, args ...any) error {
	ses.s.refused(reason)
	return refusal{c, reason + ": " + fmt.Sprintf(format, args...)}
}

func (ses *session) sendHeld(ctx context.Context, r *request) error {
	if int64(r.file) >= int64(len(ses.files)) {
		return ses.refuse(codeNotHeld, RefusedNotHeld, "no file %d", r.file)
	}
	size := ses.files[r.file].Size
	if r.off >= groupsOf(size) {
		return ses.refuse(codeNotHeld, RefusedNotHeld, "no group %d in file %d", r.off, r.file)
	}
	payload := encodeHeld(merge(ses.shelf.Held(int(r.file))), size, r.off)
	// Under a limit a list costs at least one turn, as a step of data does.
	if _, err := ses.s.pace.take(ctx, len(payload)); err != nil {
		return err
	}
	return ses.send(p2p.Frame{Type: frameHeld, ID: r.id, Payload: payload})
}

func (ses *session) sendTree(ctx context.Context, r *request) error {
	if int64(r.file) >= int64(len(ses.files)) {
		return ses.refuse(codeNotHeld, RefusedNotHeld, "no file %d", r.file)
	}
	size := uint64(ses.shelf.TreeSize(int(r.file)))
	if r.off >= size || uint64(r.length) > size-r.off {
		return ses.refuse(codeNotHeld, RefusedNotHeld, "tree of file %d has %d bytes", r.file, size)
	}
	return ses.sendRange(ctx, r, ses.shelf.ReadTree)
}

func (ses *session) sendData(ctx context.Context, r *request) error {
	if int64(r.file) >= int64(len(ses.files)) {
		return ses.refuse(codeNotHeld, RefusedNotHeld, "no file %d", r.file)
	}
	size := uint64(ses.files[r.file].Size)
	if r.off >= size || uint64(r.length) > size-r.off {
		return ses.refuse(codeNotHeld, RefusedNotHeld, "file %d has %d bytes", r.file, size)
	}
	if r.length%Group != 0 && r.off+uint64(r.length) != size {
		return ses.refuse(codeNotHeld, RefusedNotHeld, "range ends within a group")
	}
	return ses.sendRange(ctx, r, ses.shelf.ReadAt)
}

type reader func(file int, p []byte, off int64) (int, error)

// sendRange sends a range in pieces. What can not be read ends it with a refusal.
func (ses *session) sendRange(ctx context.Context, r *request, read reader) error {
	for off, left := int64(r.off), int(r.length); left > 0; {
		if r.cancelled.Load() {
			return refusal{codeCancelled, "cancelled"}
		}
		n, err := ses.s.pace.take(ctx, min(left, ses.piece))
		if err != nil {
			return err
		}
		payload, err := ses.w.Payload(n)
		if err != nil {
			return err
		}
		if got, err := read(int(r.file), payload, off); got < n {
			return ses.unreadable(r, off, err)
		}
		off, left = off+int64(n), left-n
		var flags uint8
		if left == 0 {
			flags = flagLast
		}
		if err := ses.sendPiece(flags, r.id, n); err != nil {
			return err
		}
	}
	return nil
}

// unreadable tells what is gone since it was announced from what should be here.
func (ses *session) unreadable(r *request, off int64, err error) error {
	if r.typ == frameAskData && covers(merge(ses.shelf.Held(int(r.file))), Span{int64(r.off), int64(r.length)}) {
		return ses.refuse(codeInternal, RefusedUnreadable, "file %d at %d: %v", r.file, off, err)
	}
	return ses.refuse(codeNotHeld, RefusedNotHeld, "file %d at %d: %v", r.file, off, err)
}

// sendPiece sends the payload of n bytes that is in the writer, and sizes the next one.
func (ses *session) sendPiece(flags uint8, id uint64, n int) error {
	start := time.Now()
	if err := ses.c.SetWriteDeadline(start.Add(ses.s.cfg.WriteTimeout)); err != nil {
		return err
	}
	if err := ses.w.Send(framePiece, flags, id); err != nil {
		return ses.writeError(err)
	}
	switch took := time.Since(start); {
	case took < fastPiece:
		ses.piece = min(2*ses.piece, ses.most)
	case took > slowPiece:
		ses.piece = max(ses.piece/2, firstPiece)
	}
	ses.s.sent(ses.c.Remote(), n)
	return nil
}

// send sends a frame that is no piece.
func (ses *session) send(f p2p.Frame) error {
	if err := ses.c.SetWriteDeadline(time.Now().Add(ses.s.cfg.WriteTimeout)); err != nil {
		return err
	}
	return ses.writeError(ses.w.Write(f))
}

func (ses *session) writeError(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		ses.s.refused(RefusedSlow)
		return fmt.Errorf("%s: %w", RefusedSlow, err)
	}
	return err
}
