package govern

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"strings"

	"kvasird/settle"
)

const firstLine = "kvasir governance v1\n"

// Errors of signatures.
var (
	ErrText      = errors.New("the wallet signed another text than this proposal's")
	ErrSignature = errors.New("the signature is not the wallet's over this proposal")
)

// Signature is one wallet's consent to a proposal.
type Signature struct {
	Wallet settle.Wallet
	Format Format
	Signed []byte // what the wallet says that it signed; it has to be what Message gives
	Bytes  settle.Signature
}

// Text is what a wallet shows its owner: every number of the proposal, for this wallet alone.
func (p *Proposal) Text(wallet settle.Wallet) string {
	var b strings.Builder
	b.WriteString(firstLine)
	fmt.Fprintf(&b, "network: %x\ncluster: %s\nproposal: %d\n", p.Network[:], p.Cluster, p.Sequence)
	for _, c := range p.Changes {
		fmt.Fprintf(&b, "%s: %d -> %d\n", c.Name, c.Old, c.New)
	}
	fmt.Fprintf(&b, "from epoch: %d\nsign before: %d\nwallet: %s\nchoice: approve\n", p.Epoch, p.Expires, wallet)
	return b.String()
}

// Message is the bytes that a wallet signs in a format.
func (p *Proposal) Message(wallet settle.Wallet, f Format) ([]byte, error) {
	text := p.Text(wallet)
	if len(text) > maxText {
		return nil, fmt.Errorf("govern: %w: a text of %d bytes, at most %d: change fewer parameters at once", ErrProposal, len(text), maxText)
	}
	return Wrap(p.Network, wallet, f, text)
}

// Verify says whether a wallet consents to the proposal. Errors: settle.ErrWeakKey, ErrText,
// ErrSignature.
func (p *Proposal) Verify(s Signature) error {
	if err := settle.CheckKey(s.Wallet); err != nil {
		return fmt.Errorf("govern: %w", err)
	}
	want, err := p.Message(s.Wallet, s.Format)
	if err != nil {
		return err
	}
	if string(s.Signed) != string(want) {
		return fmt.Errorf("govern: wallet %s, format %s: %w: propose again, and sign what that gives", s.Wallet, s.Format, ErrText)
	}
	if !ed25519.Verify(s.Wallet[:], want, s.Bytes[:]) {
		return fmt.Errorf("govern: wallet %s, format %s: %w", s.Wallet, s.Format, ErrSignature)
	}
	return nil
}
