package p2p

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/pelletier/go-toml/v2"
	"lukechampine.com/blake3"
)

// The network file, version 1: TOML that people copy to each other.
//
//	version = 1
//	name = "home"                       # 1 to 32 of a-z 0-9 -
//	admission = "invitation"            # or "open", "closed"
//	authority = "12D3KooW…"             # whose key signs tickets and revocations
//	created = "2026-01-02T15:04:05Z"
//	nonce = "000102030405060708090a0b0c0d0e0f"
//	target_replicas = 2                 # 1 to 16; left out: 2
//	audit_interval = 64                 # 1 to 65536; left out: 64. One of so many answers is audited
//	models = []                         # model ids that volunteers hold; none: any
//
//	[token]                             # left out: nothing is paid here; see Token
//
//	[contact]
//	bootstrap = []                      # multiaddrs with /p2p/ID to come in by
//	relays = []
//	members = []                        # peer ids, in a closed network
//
// The network id is <name>-<first 20 hex digits of BLAKE3 over the deterministic CBOR of
// everything outside of [contact]>. So two files with one id agree on the rules, and an
// address that changes, or a member that is added, does not split the network: the
// contact is each node's own copy.
//
//	hashed: 1 version, uint    2 name, text        3 admission, text   4 authority, bytes
//	        5 created, unix s  6 nonce, 16 bytes   7 target_replicas   8 models, sorted texts
//	        9 token, see Token  10 audit_interval, 0 for the default
//
// 4, 8, 9 and 10 are left out when they are empty. Keys are only ever added, and left out while
// they are empty, so that the id of an older file stays.
const (
	genesisVersion = 1

	// MaxGenesis bounds a network file in bytes.
	MaxGenesis      = 512 << 10
	maxContacts     = 64   // addresses of a kind
	maxContactText  = 512  // bytes of an address
	maxMembers      = 4096 // peer ids
	maxReplicas     = 16
	defaultReplicas = 2

	maxAuditInterval     = 1 << 16
	defaultAuditInterval = 64

	genesisTime = "2006-01-02T15:04:05Z"
)

// Admission says who may come into a network.
type Admission string

// The ways to be admitted.
const (
	Open       Admission = "open"       // everybody
	Invitation Admission = "invitation" // whoever has a ticket
	Closed     Admission = "closed"     // members, and tickets that name their peer
)

// Genesis is a network: what all of its nodes agree on, and how this one finds them.
type Genesis struct {
	Name           string
	Admission      Admission
	Authority      peer.ID   // signs tickets and revocations; may be "" when open
	Created        time.Time // UTC, whole seconds
	Nonce          [16]byte  // tells networks of one name apart
	TargetReplicas int       // holders wanted of every expert
	AuditInterval  int       // one of so many answers of expert workers is computed again by another
	Models         []string  // model ids that volunteers keep to, sorted; none: any model
	Token          *Token    // nil: nothing is paid
	Contact        Contact
}

// Contact is not part of the network's identity: each node may have its own.
type Contact struct {
	Bootstrap []string  // multiaddrs with /p2p/ID
	Relays    []string  // the same
	Members   []peer.ID // of a closed network
}

// genesisFile is the TOML form.
type genesisFile struct {
	Version        int         `toml:"version"`
	Name           string      `toml:"name"`
	Admission      string      `toml:"admission"`
	Authority      string      `toml:"authority"`
	Created        string      `toml:"created"`
	Nonce          string      `toml:"nonce"`
	TargetReplicas *int        `toml:"target_replicas"`
	AuditInterval  *int        `toml:"audit_interval"`
	Models         []string    `toml:"models"`
	Token          *tokenFile  `toml:"token"`
	Contact        contactFile `toml:"contact"`
}

type contactFile struct {
	Bootstrap []string `toml:"bootstrap"`
	Relays    []string `toml:"relays"`
	Members   []string `toml:"members"`
}

// GenesisKeys are the dotted names of all keys of a network file.
var GenesisKeys = []string{
	"version", "name", "admission", "authority", "created", "nonce", "target_replicas", "audit_interval", "models",
	"token", "token.mint", "token.token_program", "token.decimals", "token.cluster", "token.vault_owner", "token.settlement",
	"token.wallets", "token.threshold", "token.devnet", "token.operators", "token.first_price", "token.parameters",
	"contact", "contact.bootstrap", "contact.relays", "contact.members",
}

// UnknownKeyError says that a network file has a key that is none of GenesisKeys.
type UnknownKeyError struct {
	Line int
	Key  string
}

func (e *UnknownKeyError) Error() string {
	return fmt.Sprintf("%d: unknown key %q", e.Line, e.Key)
}

// genesisCBOR is the hashed form.
type genesisCBOR struct {
	Version        uint     `cbor:"1,keyasint"`
	Name           string   `cbor:"2,keyasint"`
	Admission      string   `cbor:"3,keyasint"`
	Authority      []byte   `cbor:"4,keyasint,omitempty"`
	Created        int64    `cbor:"5,keyasint"`
	Nonce          []byte   `cbor:"6,keyasint"`
	TargetReplicas uint     `cbor:"7,keyasint"`
	Models         []string `cbor:"8,keyasint,omitempty"`

	Token *tokenCBOR `cbor:"9,keyasint,omitempty"`

	AuditInterval uint `cbor:"10,keyasint,omitempty"` // 0: the default
}

var (
	genesisName  = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)
	modelPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// NewGenesis makes a network that nobody has yet. An open one takes "" as authority.
func NewGenesis(name string, admission Admission, authority peer.ID, now time.Time) (*Genesis, error) {
	g := &Genesis{
		Name: name, Admission: admission, Authority: authority, Created: now.UTC().Truncate(time.Second),
		TargetReplicas: defaultReplicas, AuditInterval: defaultAuditInterval,
	}
	rand.Read(g.Nonce[:])
	return g, g.check()
}

// ParseGenesis reads a network file. Errors begin with the line where there is one.
func ParseGenesis(text []byte) (*Genesis, error) {
	if len(text) > MaxGenesis {
		return nil, fmt.Errorf("network file is larger than %d bytes", MaxGenesis)
	}
	var f genesisFile
	err := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields().Decode(&f)
	if f.Version > genesisVersion {
		return nil, fmt.Errorf("version %d of the network file: this kvasird knows %d: update it", f.Version, genesisVersion)
	}
	var unknown *toml.StrictMissingError
	var bad *toml.DecodeError
	switch {
	case errors.As(err, &unknown) && len(unknown.Errors) > 0:
		line, _ := unknown.Errors[0].Position()
		return nil, &UnknownKeyError{line, strings.Join(unknown.Errors[0].Key(), ".")}
	case errors.As(err, &bad):
		line, column := bad.Position()
		return nil, fmt.Errorf("%d:%d: %s", line, column, strings.TrimPrefix(bad.Error(), "toml: "))
	case err != nil:
		return nil, err
	}
	return f.genesis()
}

// genesis gives the values of the file their types.
func (f *genesisFile) genesis() (*Genesis, error) {
	g := &Genesis{
		Name: f.Name, Admission: Admission(f.Admission), TargetReplicas: defaultReplicas, AuditInterval: defaultAuditInterval,
		Models: slices.Sorted(slices.Values(f.Models)), Contact: Contact{Bootstrap: f.Contact.Bootstrap, Relays: f.Contact.Relays},
	}
	if f.Version != genesisVersion {
		return nil, fmt.Errorf("version = %d: want %d", f.Version, genesisVersion)
	}
	var err error
	if g.Created, err = time.Parse(genesisTime, f.Created); err != nil || g.Created.Format(genesisTime) != f.Created {
		return nil, fmt.Errorf("created = %q: want a time like %q", f.Created, genesisTime)
	}
	if n, err := hex.Decode(g.Nonce[:], []byte(f.Nonce[:min(len(f.Nonce), 32)])); err != nil || n != 16 || f.Nonce != hex.EncodeToString(g.Nonce[:]) {
		return nil, fmt.Errorf("nonce = %q: want 32 lower-case hex digits", f.Nonce)
	}
	if f.TargetReplicas != nil {
		g.TargetReplicas = *f.TargetReplicas
	}
	if f.AuditInterval != nil {
		g.AuditInterval = *f.AuditInterval
	}
	if f.Authority != "" {
		if g.Authority, err = peer.Decode(f.Authority); err != nil {
			return nil, fmt.Errorf("authority = %q: want a peer id like 12D3KooW…", f.Authority)
		}
	}
	if len(f.Contact.Members) > maxMembers {
		return nil, fmt.Errorf("contact.members: %d of them, at most %d", len(f.Contact.Members), maxMembers)
	}
	for _, s := range f.Contact.Members {
		id, err := peer.Decode(s)
		if err != nil {
			return nil, fmt.Errorf("contact.members: %q is no peer id: want one like 12D3KooW…", s)
		}
		g.Contact.Members = append(g.Contact.Members, id)
	}
	if g.Token, err = f.Token.token(); err != nil {
		return nil, err
	}
	return g, g.check()
}

// check refuses what no network can be.
func (g *Genesis) check() error {
	switch {
	case !genesisName.MatchString(g.Name):
		return fmt.Errorf("name = %q: want 1 to 32 of a-z 0-9 -", g.Name)
	case g.Admission != Open && g.Admission != Invitation && g.Admission != Closed:
		return fmt.Errorf("admission = %q: want open, invitation or closed", g.Admission)
	case g.Authority == "" && g.Admission != Open:
		return fmt.Errorf("authority is missing: admission %q needs whoever signs tickets", g.Admission)
	case g.TargetReplicas < 1 || g.TargetReplicas > maxReplicas:
		return fmt.Errorf("target_replicas = %d: want 1 to %d", g.TargetReplicas, maxReplicas)
	case g.AuditInterval < 1 || g.AuditInterval > maxAuditInterval:
		return fmt.Errorf("audit_interval = %d: want 1 to %d", g.AuditInterval, maxAuditInterval)
	case g.Created.Unix() < 0 || g.Created.Year() > 9999:
		return fmt.Errorf("created: the year %d is none", g.Created.Year())
	case len(g.Models) > maxModels:
		return fmt.Errorf("models: %d of them, at most %d", len(g.Models), maxModels)
	}
	if g.Authority != "" {
		if _, err := authorityKey(g.Authority); err != nil {
			return err
		}
	}
	for i, m := range g.Models {
		if !modelPattern.MatchString(m) {
			return fmt.Errorf("models: %q is no model id: want 64 lower-case hex digits", m)
		}
		if i > 0 && g.Models[i-1] == m {
			return fmt.Errorf("models: %q is there twice", m)
		}
	}
	if err := g.Token.check(); err != nil {
		return err
	}
	if err := checkContacts("contact.bootstrap", g.Contact.Bootstrap); err != nil {
		return err
	}
	return checkContacts("contact.relays", g.Contact.Relays)
}

func checkContacts(key string, addrs []string) error {
	if len(addrs) > maxContacts {
		return fmt.Errorf("%s: %d of them, at most %d", key, len(addrs), maxContacts)
	}
	for _, a := range addrs {
		if len(a) > maxContactText {
			return fmt.Errorf("%s: an address of %d bytes, at most %d", key, len(a), maxContactText)
		}
		// Printable, so that it can be written into a file and a log again.
		if _, err := ParsePeer(a); err != nil || strconv.Quote(a) != `"`+a+`"` {
			return fmt.Errorf("%s: %q: want an address like /ip4/192.168.1.5/tcp/19001/p2p/12D3KooW…", key, a)
		}
	}
	return nil
}

// authorityKey is the public key in a peer id.
func authorityKey(id peer.ID) (crypto.PubKey, error) {
	key, err := id.ExtractPublicKey()
	if err != nil || key.Type() != crypto.Ed25519 {
		return nil, fmt.Errorf("authority %s is not the peer id of an ed25519 key", id)
	}
	return key, nil
}

// hashed is the encoding that the id is made of.
func (g *Genesis) hashed() []byte {
	audits := uint(g.AuditInterval)
	if audits == defaultAuditInterval {
		audits = 0
	}
	return must(encMode.Marshal(genesisCBOR{
		Version: genesisVersion, Name: g.Name, Admission: string(g.Admission), Authority: []byte(g.Authority),
		Created: g.Created.Unix(), Nonce: g.Nonce[:], TargetReplicas: uint(g.TargetReplicas), Models: g.Models,
		Token: g.Token.hashed(), AuditInterval: audits,
	}))
}

// Hash is what the network id has the beginning of, and records of money are bound to.
func (g *Genesis) Hash() [32]byte { return blake3.Sum256(g.hashed()) }

// ID is the network id, a part of every protocol id, topic and signature.
func (g *Genesis) ID() string {
	sum := g.Hash()
	return g.Name + "-" + hex.EncodeToString(sum[:10])
}

// String is the network file.
func (g *Genesis) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# A kvasir network: `kvasird run --network FILE` joins it. Its id, which follows from\n"+
		"# everything above [contact], is %s.\n", g.ID())
	fmt.Fprintf(&b, "version = %d\nname = %q\nadmission = %q # open, invitation or closed\n", genesisVersion, g.Name, g.Admission)
	if g.Authority != "" {
		fmt.Fprintf(&b, "authority = %q # signs tickets and revocations\n", g.Authority)
	}
	fmt.Fprintf(&b, "created = %q\nnonce = %q\n", g.Created.Format(genesisTime), hex.EncodeToString(g.Nonce[:]))
	fmt.Fprintf(&b, "target_replicas = %d # nodes wanted for every expert\n", g.TargetReplicas)
	fmt.Fprintf(&b, "audit_interval = %d # one of so many answers of expert workers is computed again by another\n", g.AuditInterval)
	writeList(&b, "models", g.Models, "model ids that volunteers keep to; none: any")
	g.Token.write(&b)
	b.WriteString("\n# How to find the others. Each node may change its copy: the id stays.\n[contact]\n")
	writeList(&b, "bootstrap", g.Contact.Bootstrap, "addresses with /p2p/ID to come in by")
	writeList(&b, "relays", g.Contact.Relays, "addresses with /p2p/ID of relays")
	var members []string
	for _, m := range g.Contact.Members {
		members = append(members, m.String())
	}
	writeList(&b, "members", members, "peer ids that a closed network lets in")
	return b.String()
}

func writeList(b *strings.Builder, key string, list []string, about string) {
	fmt.Fprintf(b, "# %s\n%s = [", about, key)
	for _, s := range list {
		fmt.Fprintf(b, "\n  %q,", s)
	}
	if len(list) > 0 {
		b.WriteByte('\n')
	}
	b.WriteString("]\n")
}
