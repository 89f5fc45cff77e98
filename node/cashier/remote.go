package cashier

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"kvasird/p2p"
	"kvasird/settle"
)

// Errors of a Remote that are no refusals.
var (
	ErrAway   = errors.New("the node that settles cannot be reached")
	ErrLost   = errors.New("it was asked, and its answer is lost") // ErrAway too
	ErrFailed = errors.New("the settlement failed")
)

// pauses are between the tries of a call.
var pauses = [...]time.Duration{200 * time.Millisecond, time.Second}

// Remote is the Service of a settlement elsewhere. It is safe for concurrent use. A call
// whose connection breaks is made again, but for those that count once; errors are
// *Refusal, ErrAway, ErrLost and ErrFailed.
type Remote struct {
	dial func(ctx context.Context) (Conn, error)
}

// NewRemote returns the settlement that dial opens a stream to, of Protocol.
func NewRemote(dial func(ctx context.Context) (Conn, error)) *Remote { return &Remote{dial} }

// callRemote makes a call, again where that is safe and may help.
func callRemote[Out any](ctx context.Context, r *Remote, o op, in any) (out Out, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTime+readTime)
	defer cancel()
	for try := 0; ; try++ {
		sent, err := r.try(ctx, o, in, &out)
		var refused *Refusal
		var bad *protocolError
		switch {
		case err == nil, errors.As(err, &refused), errors.Is(err, ErrFailed):
			return out, err
		case errors.As(err, &bad):
			return out, fmt.Errorf("%w: its answer cannot be read: %w", ErrFailed, err)
		case sent && (o == opActivate || o == opRun): // a code counts once, and what runs is refused
			return out, fmt.Errorf("%w: %w: %w", ErrAway, ErrLost, err)
		case try == len(pauses), ctx.Err() != nil:
			return out, fmt.Errorf("%w: %w", ErrAway, err)
		}
		select {
		case <-ctx.Done():
			return out, fmt.Errorf("%w: %w", ErrAway, err)
		case <-time.After(pauses[try]):
		}
	}
}

// try makes a call once. sent says that the settlement may have taken it.
func (r *Remote) try(ctx context.Context, o op, in, out any) (sent bool, err error) {
	payload, most := encodeCall(in), maxCall
	if o == opEnd {
		most = maxEnd
	}
	if len(payload) > most {
		return false, &Refusal{Code: CodeBad, Text: fmt.Sprintf("what is asked takes %d bytes, at most %d", len(payload), most)}
	}
	c, err := r.dial(ctx)
	if err != nil {
		return false, err
	}
	var writing sync.WaitGroup
	defer writing.Wait()
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if err := errors.Join(c.SetWriteDeadline(time.Now().Add(writeTime)), c.SetReadDeadline(time.Now().Add(callTime+readTime))); err != nil {
		return false, err
	}
	// A settlement may refuse before it has read all, so that its answer is read meanwhile. When
	// this fails, reading does.
	writing.Go(func() { _ = p2p.NewFrameWriter(c, maxEnd).Write(p2p.Frame{Type: uint8(o), Payload: payload}) })
	f, err := p2p.NewFrameReader(c, maxDone).Next()
	switch {
	case errors.Is(err, p2p.ErrFrame), errors.Is(err, p2p.ErrFrameTooLarge):
		return true, &protocolError{err.Error()}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return true, fmt.Errorf("no answer within %v", callTime+readTime)
	case err != nil:
		return true, err
	}
	return true, readAnswer(f, out)
}

// The methods of Service.

func (r *Remote) Terms(ctx context.Context) (Terms, error) {
	return callRemote[Terms](ctx, r, opTerms, noArgs{})
}

func (r *Remote) Quote(ctx context.Context, a Ask) (Offer, error) {
	return callRemote[Offer](ctx, r, opQuote, a)
}

func (r *Remote) Pay(ctx context.Context, p Proof) (settle.Request, error) {
	return callRemote[settle.Request](ctx, r, opPay, p)
}

func (r *Remote) PayX402(ctx context.Context, p Partial) (settle.Request, error) {
	return callRemote[settle.Request](ctx, r, opPayX402, p)
}

func (r *Remote) Debit(ctx context.Context, id settle.QuoteID) (settle.Request, error) {
	return callRemote[settle.Request](ctx, r, opDebit, id)
}

func (r *Remote) Request(ctx context.Context, id settle.QuoteID) (settle.Request, error) {
	return callRemote[settle.Request](ctx, r, opRequest, id)
}

func (r *Remote) Run(ctx context.Context, id settle.QuoteID) (Started, error) {
	return callRemote[Started](ctx, r, opRun, id)
}

func (r *Remote) End(ctx context.Context, e Ended) (Settled, error) {
	return callRemote[Settled](ctx, r, opEnd, e)
}

func (r *Remote) Credits(ctx context.Context, ids []settle.QuoteID) ([]WorkerCredit, error) {
	return callRemote[[]WorkerCredit](ctx, r, opCredits, ids)
}

func (r *Remote) Link(ctx context.Context, l Link) (Linked, error) {
	return callRemote[Linked](ctx, r, opLink, l)
}

func (r *Remote) Deposit(ctx context.Context, d Deposit) (Ledger, error) {
	return callRemote[Ledger](ctx, r, opDeposit, d)
}

func (r *Remote) Unstake(ctx context.Context, m Move) (Ledger, error) {
	return callRemote[Ledger](ctx, r, opUnstake, m)
}

func (r *Remote) Claim(ctx context.Context, m Move) (Payout, error) {
	return callRemote[Payout](ctx, r, opClaim, m)
}

func (r *Remote) Complain(ctx context.Context, c Complaint) (Complained, error) {
	return callRemote[Complained](ctx, r, opComplain, c)
}

func (r *Remote) Ledger(ctx context.Context, owner settle.Key) (Ledger, error) {
	return callRemote[Ledger](ctx, r, opLedger, owner)
}

func (r *Remote) Propose(ctx context.Context, c Change) (Proposed, error) {
	return callRemote[Proposed](ctx, r, opPropose, c)
}

func (r *Remote) Activate(ctx context.Context, a Activation) (Activated, error) {
	return callRemote[Activated](ctx, r, opActivate, a)
}
