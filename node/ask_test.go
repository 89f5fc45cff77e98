package node

import (
	"context"
	"errors"
	"io"
	"reflect"
	"testing"
	"time"

	"kvasird/ggml"
	"kvasird/node/api"
	"kvasird/node/engine"
	"kvasird/node/gateway"
)

// spoken is an answerer of three tokens, or of what comes before an error.
type spoken struct {
	answerer
	starts, stops error
	after         int // tokens before stops
	hangs         bool
}

func (s *spoken) generate(context.Context, engine.Request, engine.Extra) (generation, error) {
	if s.starts != nil {
		return nil, s.starts
	}
	return &speech{s: s}, nil
}

type speech struct {
	generation
	s *spoken
	n int
}

func (g *speech) NextToken(ctx context.Context) (ggml.Token, []byte, error) {
	switch {
	case g.s.stops != nil && g.n == g.s.after:
		return 0, nil, g.s.stops
	case g.s.hangs && g.n == g.s.after:
		<-ctx.Done()
		return 0, nil, ctx.Err()
	case g.n == 3:
		return 0, nil, io.EOF
	}
	g.n++
	return 1, []byte("x"), nil
}

func (g *speech) Finish() string { return "length" }

// TestAskOutcome: what was made is paid, whoever ended it, but for what the engine could not finish.
func TestAskOutcome(t *testing.T) {
	broken, gone := errors.New("layer 3 is gone"), errors.New("who asked is gone")
	for _, tt := range []struct {
		name   string
		model  spoken
		stop   []string
		emit   error
		late   bool
		want   gateway.Outcome
		tokens int
	}{
		{"whole", spoken{}, nil, nil, false, gateway.Outcome{Delivered: 8, Computed: 8}, 3},
		{"a stop text", spoken{}, []string{"xx"}, nil, false, gateway.Outcome{Delivered: 7, Computed: 7}, 2},
		{"it does not start", spoken{starts: broken}, nil, nil, false, gateway.Outcome{Failed: broken}, 0},
		{"nothing comes", spoken{stops: broken}, nil, nil, false, gateway.Outcome{Failed: broken}, 0},
		{"the engine fails", spoken{stops: broken, after: 2}, nil, nil, false, gateway.Outcome{Computed: 7, Failed: broken}, 2},
		{"who asked is gone", spoken{}, nil, gone, false, gateway.Outcome{Delivered: 6, Computed: 6, Failed: gone}, 1},
		{"the time is up", spoken{hangs: true, after: 2}, nil, nil, true, gateway.Outcome{Delivered: 7, Computed: 7, Failed: context.DeadlineExceeded}, 2},
	} {
		ctx, cancel := t.Context(), func() {}
		if tt.late {
			ctx, cancel = context.WithTimeout(ctx, 10*time.Millisecond)
		}
		a := &asked{filter: gateway.TextFilter{Stops: tt.stop}, emit: func(api.AskEvent) error { return tt.emit }}
		a.done.PromptTokens = 5
		err := a.answer(ctx, &tt.model, engine.Request{})
		cancel()
		if got := a.outcome(err); !reflect.DeepEqual(got, tt.want) || a.done.Tokens != tt.tokens {
			t.Errorf("%s: got %+v after %d tokens, want %+v after %d", tt.name, got, a.done.Tokens, tt.want, tt.tokens)
		}
	}
}

// TestAskUnpaid: programs know by the code why nobody paid.
func TestAskUnpaid(t *testing.T) {
	for status, want := range map[int]api.Code{402: api.CodePayment, 403: api.CodePayment, 404: api.CodeNotFound, 429: api.CodeBusy, 503: api.CodeNotReady, 400: api.CodeBadRequest} {
		var got *api.Error
		if err := askError(t.Context(), &gateway.PaymentError{Status: status, Message: "pay"}); !errors.As(err, &got) || got.Code != want || got.Message != "pay" {
			t.Errorf("%d: got %+v, want %s", status, err, want)
		}
	}
}
