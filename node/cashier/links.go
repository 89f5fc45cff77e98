package cashier

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/govern"
)

// linkAhead is how far a wallet's clock may be ahead, in seconds.
const linkAhead = 600

func linkKey(n settle.Node) []byte { return append([]byte{'l'}, n[:]...) }

// LinkText is what a wallet signs, wrapped by govern.Wrap under the network as its domain,
// to have the pay of a node; of a zero Wallet, what the linked wallet signs to let go.
func LinkText(network settle.Hash, n settle.Node, l Link) string {
	wallet, spend := l.Wallet.String(), "no"
	if l.Wallet == (settle.Wallet{}) {
		wallet = "none"
	}
	if l.Spend {
		spend = "yes"
	}
	return fmt.Sprintf("kvasir wallet link v1\nnetwork: %x\nnode: %s\npay to: %s\nthe node may spend: %s\nsince: %d\n", network, n, wallet, spend, l.Since)
}

// verifyText checks that a wallet signed a text in a format. Error: a Refusal.
func verifyText(network settle.Hash, signer settle.Wallet, format string, signature settle.Signature, text string) error {
	f, err := govern.ParseFormat(format)
	if err != nil {
		return refusal(CodeBad, "format", "%v", err)
	}
	m, err := govern.Wrap(network, signer, f, text)
	if err != nil {
		return err
	}
	if err := settle.Verify(signer, m, signature); errors.Is(err, settle.ErrWeakKey) {
		return refusal(CodeBad, "wallet", "%v: use a wallet's", err)
	} else if err != nil {
		return refusal(CodeRights, "signature", "%v: wallet %s signs the text as it is given, in the format %s", err, signer, f)
	}
	return nil
}

// Link is part of Service. A node has one wallet at a time: another one's needs that the
// first lets go, so that who takes a node's key cannot take its bond. Of several of one
// wallet the latest holds.
func (t *Teller) Link(_ context.Context, l Link) (Linked, error) {
	b, v := t.cfg.Books, t.cfg.Chain.Vault()
	if now := b.seconds(); l.Since == 0 || l.Since > now+linkAhead {
		return Linked{}, refusal(CodeBad, "since", "a link since %d: it is %d, in Unix seconds", l.Since, now)
	}
	if l.Wallet == v.Owner || l.Wallet == v.Account {
		return Linked{}, refusal(CodeBad, "wallet", "%s is the vault: link a wallet of your own", l.Wallet)
	}
	old, err := b.Linked(t.node)
	if err != nil {
		return Linked{}, err
	}
	none, signer := settle.Wallet{}, l.Wallet
	switch {
	case l.Wallet == none && old.Wallet == none && old.Since == l.Since:
		return old, nil // it was let go of by this
	case l.Wallet == none && old.Wallet == none:
		return Linked{}, refusal(CodeState, "wallet", "no wallet is linked")
	case l.Wallet == none:
		signer = old.Wallet
	case old.Wallet != none && old.Wallet != l.Wallet:
		return Linked{}, refusal(CodeRights, "wallet", "the node is linked to %s, which has to let go first: sign an unlink with it", old.Wallet)
	}
	if err := verifyText(t.cfg.Network, signer, l.Format, l.Signature, LinkText(t.cfg.Network, t.node, l)); err != nil {
		return Linked{}, err
	}
	next := Linked{Node: t.node, Wallet: l.Wallet, Spend: l.Spend && l.Wallet != none, Since: l.Since}
	if next == old {
		return old, nil
	}
	if l.Since <= old.Since {
		return Linked{}, refusal(CodeBad, "since", "a link since %d holds, this one is since %d: sign one of now", old.Since, l.Since)
	}
	return next, b.link(old, next)
}

// link replaces one link by the next.
func (b *Books) link(old, next Linked) error {
	return b.store.Update(func(tx *kv.Tx) error {
		p := page{tx}
		if is, err := p.linked(next.Node); err != nil || is != old {
			return errors.Join(err, &Refusal{Code: CodeBusy, Text: "the node was linked at the same time: ask again", Retry: 1})
		}
		// What was free before there was a wallet is waiting.
		bond, err := p.bond(next.Node)
		return errors.Join(err, p.save(linkKey(next.Node), next), p.wake(next.Node, bond))
	})
}

func (p page) linked(n settle.Node) (l Linked, err error) {
	l.Node = n
	_, err = p.load(linkKey(n), &l)
	return l, err
}

// Linked is the link of a node; its Wallet is zero when there is none.
func (b *Books) Linked(n settle.Node) (l Linked, err error) {
	err = b.store.View(func(tx *kv.Tx) (err error) {
		l, err = page{tx}.linked(n)
		return err
	})
	return l, err
}

// idOf makes an id that a node chose its own: no other can take it before.
func idOf(what string, n settle.Node, id settle.Hash) settle.Hash {
	return sha256.Sum256(slices.Concat([]byte("kvasir "+what+" 1\n"), n[:], id[:]))
}
