package node

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/node/api"
	"kvasird/node/cashier"
	"kvasird/node/meter"
	"kvasird/node/pay"
	"kvasird/p2p"
	"kvasird/settle"
)

// serviceTokenName is the file of the node's service token in the data folder.
const serviceTokenName = "service.token"

// earningsEvery is how often it is asked for what this node earned.
const earningsEvery = time.Minute

// settlement is how a node of a network with a token reaches who settles: over the network,
// or, on the machine that settles, in its own process.
type settlement struct {
	*token
	node    settle.Node // this one
	service cashier.Service
	secret  [sha256.Size]byte // hash of the service token
	pay     *pay.Door         // of the gateway
	desk    *settling         // role settle; else nil
	grants  *meter.Grants     // what is computed for others
	log     *slog.Logger

	earned atomic.Pointer[api.Earnings] // nil: not known yet, or no wallet is linked
}

// startSettlement opens the way to who settles; nothing happens in a network without a
// token.
func (n *Node) startSettlement(ctx context.Context, identity p2p.Identity, data *Data) error {
	t, err := readToken(n.cfg.Genesis)
	if err != nil || t == nil {
		return err
	}
	s := &settlement{token: t, grants: n.metering.grants, log: n.log}
	if s.node, err = p2p.KeyOf(identity.ID()); err != nil {
		return err
	}
	secret, err := loadServiceToken(data.Path(serviceTokenName))
	if err != nil {
		return err
	}
	s.secret = hashSecret(secret)
	n.settlement = s
	s.service = cashier.NewRemote(n.dialSettlement)
	if n.cfg.Has(RoleSettle) {
		if s.desk, err = n.openDesk(ctx, t, identity); err != nil {
			return err
		}
		s.service = s.desk.as(s.node)
	}
	s.pay, err = pay.New(pay.Config{Settlement: s.service, Key: identity.PrivateKey(), Meter: n.metering, Logger: n.log})
	return err
}

// run starts the loops.
func (s *settlement) run(ctx context.Context, loops *sync.WaitGroup, fail func(error)) {
	start := func(loop func(context.Context) error) {
		loops.Go(func() {
			if err := loop(ctx); err != nil && ctx.Err() == nil {
				fail(err)
			}
		})
	}
	start(s.pay.Run)
	start(s.grants.Run)
	start(s.watch)
	if s.desk != nil {
		start(s.desk.desk.Run)
		start(s.desk.drawn.run)
	}
}

// close ends the calls of other nodes, before the books are closed.
func (s *settlement) close() {
	if s == nil || s.desk == nil {
		return
	}
	stop, done := context.WithTimeout(context.Background(), answerTime)
	defer done()
	s.desk.door.Close(stop)
}

// watch looks from time to time at what this node earned.
func (s *settlement) watch(ctx context.Context) error {
	for {
		l, err := s.service.Ledger(ctx, s.node)
		switch {
		case err != nil:
			s.log.Debug("what was earned is not known now", "reason", err)
		case l.Wallet == settle.Wallet{}:
			s.earned.Store(nil)
		default:
			s.earned.Store(&api.Earnings{Wallet: l.Wallet.String(), Earned: l.Earned.String(), Held: l.Held.String(), Bonded: l.Bonded.String(), Requests: l.Requests})
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(earningsEvery):
		}
	}
}

func (n *Node) dialSettlement(ctx context.Context) (cashier.Conn, error) {
	id, err := meet(ctx, n.host, n.settlement.peer.String())
	if err != nil {
		return nil, err
	}
	return n.host.OpenStream(ctx, id, cashier.Protocol)
}

// loadServiceToken reads the token by which programs of the operator act for this node, or
// makes it.
func loadServiceToken(path string) (string, error) {
	text, err := readPrivate(path)
	if errors.Is(err, fs.ErrNotExist) {
		var random [secretBytes]byte
		rand.Read(random[:]) // it never fails
		secret := "kvs-" + base64.RawURLEncoding.EncodeToString(random[:])
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return "", fmt.Errorf("service token: %w", err)
		}
		_, err = fmt.Fprintln(f, secret)
		return secret, errors.Join(err, f.Sync(), f.Close())
	}
	secret := strings.TrimSpace(string(text))
	if err == nil && len(secret) < secretBytes {
		err = fmt.Errorf("%s holds no token: remove it, and a new one is made", path)
	}
	return secret, err
}

func hashSecret(secret string) [sha256.Size]byte { return sha256.Sum256([]byte(secret)) }

// allows says whether a secret is the service token or an admin's key. It compares hashes
// in constant time.
func (n *Node) allows(secret string) bool {
	sum := hashSecret(secret)
	return subtle.ConstantTimeCompare(sum[:], n.settlement.secret[:]) == 1 || n.keys.admin(secret)
}

// moneyDoor are the HTTP routes of this node's accounts.
func (n *Node) moneyDoor() map[string]http.Handler {
	return cashier.Routes(cashier.RoutesConfig{Service: n.settlement.service, Node: n.settlement.node, Allowed: n.allows})
}

// Purse is this node's money.
func (n *Node) Purse() (*Purse, error) {
	s := n.settlement
	if s == nil {
		return nil, &api.Error{Code: api.CodeBadRequest, Message: errNoToken.Error()}
	}
	return &Purse{Service: s.service, Node: s.node, Network: s.authority.Network, Model: n.pricedModel, Now: time.Now}, nil
}

// pricedModel finds a model of the network by name; "" is the only one.
func (n *Node) pricedModel(name string) (string, error) {
	if name == "" {
		all := n.exchange.table.Models(time.Now())
		if len(all) != 1 {
			return "", &api.Error{Code: api.CodeBadRequest, Message: fmt.Sprintf("the network has %d models: name one", len(all))}
		}
		return all[0].String(), nil
	}
	id, err := n.findModel(name, time.Now())
	return id.String(), err
}
