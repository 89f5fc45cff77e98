package p2p

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fxamacker/cbor/v2"
	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/peer"
)

// An invitation, version 1: a ticket that the network's authority signed.
//
//	body       a map of deterministic CBOR
//	signature  64 bytes, the authority's ed25519 over ticketDomain and the body
//	tail       nothing in a ticket for one peer; in one for whoever has it
//	           as text: the seed of the ticket's own ed25519 key, 32 bytes
//	           in a hello: that key's signature over proofDomain, the body and the peer id
//
//	1 version, uint        2 network id, text      3 serial, 16 bytes   4 rights, bits
//	5 peer id, bytes       6 not before, unix s    7 expires, unix s    8 note, text
//	9 the ticket's public key, 32 bytes
//
// Either 5 or 9 is there; 8 is left out when empty. As text it is "kvt1-" and base64url
// without padding. A hello goes to strangers too, so what it shows of a ticket must be of
// use to nobody else: hence the proof.
//
// There is one encoding of a ticket: unknown keys and anything else that is not it are
// refused, so a restriction that is added needs a new version. Rights that are not known
// are ignored.
const (
	ticketVersion = 1
	ticketPrefix  = "kvt1-"
	ticketDomain  = "kvasir ticket 1\n"
	proofDomain   = "kvasir ticket proof 1\n"
	signatureSize = ed25519.SignatureSize

	// maxTicket bounds a ticket in bytes: text, id and note at their longest.
	maxTicket = 512
	// ticketSkew is how far the clock of whoever issued a ticket may be ahead.
	ticketSkew = 5 * time.Minute
	maxUnix    = 253402300799 // the end of the year 9999
)

// Rights are what a node lets a peer do.
type Rights uint8

// The rights, bits on the wire.
const (
	Join  Rights = 1 << iota // be connected, hold experts, compute for others
	Infer                    // have others compute for it
)

// Has reports whether r contains all of want.
func (r Rights) Has(want Rights) bool { return r&want == want }

func (r Rights) String() string {
	var words []string
	if r.Has(Join) {
		words = append(words, "join")
	}
	if r.Has(Infer) {
		words = append(words, "infer")
	}
	if len(words) == 0 {
		return "none"
	}
	return strings.Join(words, ", ")
}

// Serial names a ticket, so that it can be revoked.
type Serial [16]byte

func (s Serial) String() string { return hex.EncodeToString(s[:]) }

// ParseSerial reads what String writes.
func ParseSerial(text string) (Serial, error) {
	var s Serial
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(s) {
		return s, fmt.Errorf("serial %q: want 32 hex digits", text)
	}
	copy(s[:], b)
	return s, nil
}

// Ticket is an invitation.
type Ticket struct {
	Network   string // network id
	Serial    Serial
	Rights    Rights
	Subject   peer.ID // "": whoever has it
	NotBefore time.Time
	Expires   time.Time
	Note      string // for people

	key []byte // public, of a ticket without a subject
}

type ticketCBOR struct {
	Version   uint   `cbor:"1,keyasint"`
	Network   string `cbor:"2,keyasint"`
	Serial    []byte `cbor:"3,keyasint"`
	Rights    uint8  `cbor:"4,keyasint"`
	Subject   []byte `cbor:"5,keyasint,omitempty"`
	NotBefore uint64 `cbor:"6,keyasint"`
	Expires   uint64 `cbor:"7,keyasint"`
	Note      string `cbor:"8,keyasint,omitempty"`
	Key       []byte `cbor:"9,keyasint,omitempty"`
}

// strictMode decodes what is signed: there is one encoding of it.
var strictMode = must(cbor.DecOptions{
	DupMapKey:         cbor.DupMapKeyEnforcedAPF,
	IndefLength:       cbor.IndefLengthForbidden,
	TagsMd:            cbor.TagsForbidden,
	ExtraReturnErrors: cbor.ExtraDecErrorUnknownField,
	MaxNestedLevels:   4,
	MaxArrayElements:  maxRevoked,
	MaxMapPairs:       16,
}.DecMode())

// IssueTicket signs a ticket of network g with a new serial; its Network and Serial are
// ignored. The right to infer needs a subject: a ticket for whoever has it may leak.
func (g *Genesis) IssueTicket(authority Identity, t Ticket) (string, error) {
	if authority.id != g.Authority {
		return "", g.wrongKey(authority)
	}
	if t.Rights.Has(Infer) && t.Subject == "" {
		return "", errors.New("a ticket with the right to infer must be for one peer: name its id, since a ticket for whoever has it may leak")
	}
	t.Network = g.ID()
	rand.Read(t.Serial[:])
	seed := make([]byte, ed25519.SeedSize)
	rand.Read(seed)
	return t.sign(authority, seed)
}

func (g *Genesis) wrongKey(key Identity) error {
	if g.Authority == "" {
		return fmt.Errorf("network %s is open: it has no authority and needs no tickets", g.Name)
	}
	return fmt.Errorf("this is the key of %s, and the authority of %s is %s", key.id, g.Name, g.Authority)
}

// sign returns the text of t; seed is that of the ticket's own key, if it has one.
func (t *Ticket) sign(authority Identity, seed []byte) (string, error) {
	t.key = nil
	if t.Subject == "" {
		t.key = ed25519.NewKeyFromSeed(seed).Public().(ed25519.PublicKey)
	}
	body, err := t.encode()
	if err != nil {
		return "", err
	}
	sig, err := authority.Sign(append([]byte(ticketDomain), body...))
	if err != nil {
		return "", err
	}
	raw := append(body, sig...)
	if t.Subject == "" {
		raw = append(raw, seed...)
	}
	return ticketPrefix + base64.RawURLEncoding.EncodeToString(raw), nil
}

func (t *Ticket) encode() ([]byte, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	return encMode.Marshal(ticketCBOR{
		Version: ticketVersion, Network: t.Network, Serial: t.Serial[:], Rights: uint8(t.Rights), Subject: []byte(t.Subject),
		NotBefore: uint64(t.NotBefore.Unix()), Expires: uint64(t.Expires.Unix()), Note: t.Note, Key: t.key,
	})
}

func (t *Ticket) check() error {
	switch {
	case !networkPattern.MatchString(t.Network):
		return fmt.Errorf("ticket: network %q is no network id", t.Network)
	case !t.Rights.Has(Join):
		return errors.New("ticket: it does not give the right to join")
	case t.NotBefore.Unix() < 0 || t.Expires.Unix() > maxUnix || t.NotBefore.Unix() >= t.Expires.Unix():
		return errors.New("ticket: it is at no time valid")
	}
	if (t.Subject == "") != (len(t.key) == ed25519.PublicKeySize) || t.Subject != "" && t.key != nil {
		return errors.New("ticket: it is for one peer, or has a key of 32 bytes")
	}
	if t.Subject != "" {
		if _, err := peer.IDFromBytes([]byte(t.Subject)); err != nil || len(t.Subject) > maxID {
			return errors.New("ticket: it is for something that is no peer id")
		}
	}
	if err := checkText(t.Note); err != nil {
		return fmt.Errorf("ticket: note: %w", err)
	}
	return nil
}

// ParseTicket reads a ticket's text. Whether the authority signed it is for the peers to
// judge, and for Genesis.CheckTicket.
func ParseTicket(text string) (Ticket, error) {
	st, err := parseTicket(text)
	return st.Ticket, err
}

func parseTicket(text string) (signedTicket, error) {
	encoded, ok := strings.CutPrefix(text, ticketPrefix)
	if !ok {
		return signedTicket{}, fmt.Errorf("a ticket begins with %s", ticketPrefix)
	}
	if len(encoded) > base64.RawURLEncoding.EncodedLen(maxTicket) {
		return signedTicket{}, fmt.Errorf("a ticket has at most %d bytes", maxTicket)
	}
	raw, err := base64.RawURLEncoding.Strict().DecodeString(encoded)
	if err != nil || strings.ContainsAny(encoded, "\r\n") {
		return signedTicket{}, errors.New("ticket is damaged: copy all of it again")
	}
	return decodeTicket(raw, ed25519.SeedSize)
}

// presentTicket is what id's hello shows of a ticket.
func presentTicket(text string, id Identity) ([]byte, error) {
	if text == "" {
		return nil, nil
	}
	st, err := parseTicket(text)
	if err != nil {
		return nil, err
	}
	if st.Subject != "" {
		return slices.Concat(st.body, st.sig), nil
	}
	key := ed25519.NewKeyFromSeed(st.tail)
	if !bytes.Equal(key.Public().(ed25519.PublicKey), st.key) {
		return nil, errors.New("ticket is damaged: copy all of it again")
	}
	return slices.Concat(st.body, st.sig, ed25519.Sign(key, st.proved(id.id))), nil
}

// signedTicket is a ticket and the bytes that it came in.
type signedTicket struct {
	Ticket
	body, sig, tail []byte
}

// proved is what the ticket's own key signs for a peer.
func (st *signedTicket) proved(id peer.ID) []byte {
	return slices.Concat([]byte(proofDomain), st.body, []byte(id))
}

// decodeTicket reads a ticket, whose tail has a size that depends on where it comes from.
func decodeTicket(raw []byte, tail int) (st signedTicket, err error) {
	if len(raw) > maxTicket {
		return st, fmt.Errorf("ticket of %d bytes: at most %d", len(raw), maxTicket)
	}
	var c ticketCBOR
	rest, err := strictMode.UnmarshalFirst(raw, &c)
	if err != nil {
		return st, fmt.Errorf("ticket is damaged: %v", err)
	}
	if c.Version != ticketVersion {
		return st, fmt.Errorf("ticket of version %d: this kvasird knows %d", c.Version, ticketVersion)
	}
	if len(c.Serial) != len(st.Serial) || max(c.NotBefore, c.Expires) > maxUnix {
		return st, errors.New("ticket is damaged: serial or time is none")
	}
	st.Ticket = Ticket{
		Network: c.Network, Serial: Serial(c.Serial), Rights: Rights(c.Rights), Subject: peer.ID(c.Subject),
		NotBefore: time.Unix(int64(c.NotBefore), 0).UTC(), Expires: time.Unix(int64(c.Expires), 0).UTC(), Note: c.Note,
		key: c.Key,
	}
	st.body = raw[:len(raw)-len(rest)]
	again, err := st.encode()
	if err != nil {
		return st, err
	}
	if st.Subject != "" {
		tail = 0
	}
	if !bytes.Equal(again, st.body) || len(rest) != signatureSize+tail {
		return st, errors.New("ticket is damaged: not the encoding of a ticket")
	}
	st.sig, st.tail = rest[:signatureSize], rest[signatureSize:]
	return st, nil
}

// CheckTicket says what a peer with this identity may do with the ticket now, as far as
// the network file tells. Its error says why it would be refused.
func (g *Genesis) CheckTicket(text string, id Identity, now time.Time) (Rights, error) {
	shown, err := presentTicket(text, id)
	if err != nil {
		return 0, err
	}
	a, v := g.admit(id.id, shown, nil, now)
	if v.Field != "" {
		return 0, fmt.Errorf("%s is %s: %s", v.Field, v.Got, v.Want)
	}
	return a.rights, nil
}

// admission is what a peer may do, and until when.
type admission struct {
	rights  Rights
	serial  Serial    // of its ticket
	expires time.Time // of its ticket; zero: never
}

// admit decides on a peer that is authenticated as id. A nil g is an open network. Every
// refusal says what to do.
func (g *Genesis) admit(id peer.ID, ticket []byte, revoked *Revocations, now time.Time) (admission, verdict) {
	full := admission{rights: Join | Infer}
	switch {
	case g == nil || id == g.Authority:
		return full, verdict{}
	case revoked.hasPeer(id):
		return admission{}, uninvited("revoked for this peer", "whoever runs the network has put it out")
	case g.Admission == Open || g.Admission == Closed && slices.Contains(g.Contact.Members, id):
		return full, verdict{}
	case len(ticket) == 0:
		return admission{}, uninvited("missing", "ask for a ticket for "+id.String()+" and start with --ticket")
	}
	st, err := decodeTicket(ticket, signatureSize)
	if err != nil {
		return admission{}, uninvited(err.Error(), "copy all of the ticket again")
	}
	if v := g.judgeTicket(id, st.Ticket, revoked, now); v.Field != "" {
		return admission{}, v
	}
	// Last, because it is what takes time.
	key, err := authorityKey(g.Authority)
	if err == nil && !signedBy(key, append([]byte(ticketDomain), st.body...), st.sig) {
		err = errors.New("it is not signed by this network's authority")
	}
	if err == nil && st.Subject == "" && !ed25519.Verify(st.key, st.proved(id), st.tail) {
		err = errors.New("whoever shows it does not have it")
	}
	if err != nil {
		return admission{}, uninvited("forged", err.Error())
	}
	rights := st.Rights & (Join | Infer)
	if st.Subject == "" {
		rights &^= Infer // whoever has issued that: it may have leaked
	}
	return admission{rights, st.Serial, st.Expires}, verdict{}
}

func signedBy(key crypto.PubKey, message, sig []byte) bool {
	ok, err := key.Verify(message, sig)
	return err == nil && ok
}

// judgeTicket judges what a ticket says.
func (g *Genesis) judgeTicket(id peer.ID, t Ticket, revoked *Revocations, now time.Time) verdict {
	const again = "ask whoever runs the network for a new ticket"
	switch {
	case t.Network != g.ID():
		return uninvited("for network "+t.Network, "it is for another network than "+g.ID())
	case t.Subject != "" && t.Subject != id:
		return uninvited("for another peer", "ask for one for "+id.String())
	case t.Subject == "" && g.Admission == Closed:
		return uninvited("for no peer in particular", "this network is closed: ask for one for "+id.String())
	case revoked.hasSerial(t.Serial):
		return uninvited("revoked", again)
	case !now.Before(t.Expires):
		return uninvited("expired on "+t.Expires.Format(time.DateTime)+" UTC", again)
	case now.Add(ticketSkew).Before(t.NotBefore):
		return uninvited("valid from "+t.NotBefore.Format(time.DateTime)+" UTC on", "is the clock of this machine right?")
	}
	return verdict{}
}

// fieldInvitation is the RefusedError.Field of who may not come in.
const fieldInvitation = "invitation"

func uninvited(why, what string) verdict { return verdict{fieldInvitation, clip(what), clip(why)} }
