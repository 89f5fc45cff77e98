package fetch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"kvasird/p2p"

	"github.com/libp2p/go-libp2p/core/peer"
	"golang.org/x/time/rate"
)

// Source is where ranges come from.
type Source interface {
	ID() string // the same for the same source, and for people
	// Open returns a new connection, which the caller closes.
	Open(ctx context.Context) (p2p.Conn, error)
}

// FromPeer makes a source of a ready peer, over a connection of its own where there can be one.
func FromPeer(h *p2p.Host, id peer.ID) Source { return peerSource{h, id} }

type peerSource struct {
	host *p2p.Host
	id   peer.ID
}

func (s peerSource) ID() string { return s.id.String() }
func (s peerSource) Open(ctx context.Context) (p2p.Conn, error) {
	return s.host.OpenBulk(ctx, s.id, Protocol)
}

// ClientConfig says how a client downloads. Zero values stand for the defaults.
type ClientConfig struct {
	Rate    int64 // bytes/s of all fetches together; 0: no limit
	Sources int   // that one fetch uses at a time, 8
	// VerifyManifest reports whether files are what model names. Client.Manifest needs it.
	VerifyManifest func(model [32]byte, files []File) error
	// Blame is told of every fault of a source, once for each session. It may be called
	// concurrently and must not block.
	Blame  func(*BadSourceError)
	Logger *slog.Logger // nil: silent

	OpenTimeout  time.Duration // for a connection and its first messages, 15 s
	StallTimeout time.Duration // without a byte of what was asked for, 20 s
	// A source that gives less than Floor bytes/s over Window is too slow: 4 KiB/s, 10 s.
	Floor  int64
	Window time.Duration
	// Cooldown is how long a slow or stalled source is left alone: 30 s.
	Cooldown time.Duration
	// HeldEvery is how often a source is asked again what it holds when it holds nothing
	// of what is missing: 5 s.
	HeldEvery time.Duration
}

// Client fills sinks from sources.
type Client struct {
	cfg     ClientConfig
	limiter *rate.Limiter // of bytes asked for; nil: none
	most    int64         // bytes of one request
}

// NewClient makes a client.
func NewClient(cfg ClientConfig) *Client {
	setDefault(&cfg.Sources, 8)
	setDefault(&cfg.OpenTimeout, 15*time.Second)
	setDefault(&cfg.StallTimeout, 20*time.Second)
	setDefault(&cfg.Floor, 4<<10)
	setDefault(&cfg.Window, 10*time.Second)
	setDefault(&cfg.Cooldown, 30*time.Second)
	setDefault(&cfg.HeldEvery, 5*time.Second)
	if cfg.Blame == nil {
		cfg.Blame = func(*BadSourceError) {}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Client{cfg: cfg, most: MaxRange}
	if cfg.Rate > 0 {
		// Half a second's worth, so that a slow line is not filled in bursts.
		c.most = min(max(cfg.Rate/2/Group*Group, Group), MaxRange)
		c.limiter = rate.NewLimiter(rate.Limit(cfg.Rate), int(c.most))
	}
	return c
}

// Manifest asks a source for the files of a model and verifies the answer: *BadSourceError
// when it is another model's.
func (c *Client) Manifest(ctx context.Context, src Source, model [32]byte) ([]File, error) {
	if c.cfg.VerifyManifest == nil {
		return nil, errors.New("fetch: a client without VerifyManifest can not ask for manifests")
	}
	d, files, err := c.open(ctx, src, model)
	if err == nil {
		d.close()
		if err = c.cfg.VerifyManifest(model, files); err != nil {
			err = &BadSourceError{src.ID(), FaultModel, err}
		}
	}
	if err != nil {
		return nil, c.blame(src, err)
	}
	return files, nil
}

// blame tells of a fault, and gives an error that is none the name of its source.
func (c *Client) blame(src Source, err error) error {
	var bad *BadSourceError
	if !errors.As(err, &bad) {
		return fmt.Errorf("source %s: %w", src.ID(), err)
	}
	c.cfg.Blame(bad)
	return err
}
