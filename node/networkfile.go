package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/node/client"
	"kvasird/p2p"
)

// Limits of what the network commands take.
const (
	maxTicketDays     = 3650
	boundTicketDays   = 365 // default, of a ticket for one peer
	unboundTicketDays = 30  // default, of one for whoever has it
)

// NewNetwork says what network to make. Zero values are defaults.
type NewNetwork struct {
	Name      string
	Admission string   // "": open
	Replicas  int      // nodes wanted for every expert; 0: 2
	Models    []string // ids that volunteers keep to
	Bootstrap []string // multiaddrs with /p2p/ID
	Relays    []string
	Out       string // "": NAME.toml

	Token  []string // KEY=VALUE of the token section or of its parameters; none: no token
	Devnet bool     // a network to try things in
	Data   string   // state folder of the node here, which settles unless Token names another; "": the default one
}

// CreateNetwork writes the network file and, unless the network is open, the key
// of its authority beside it. Nothing that is there is replaced. It says on w
// what to do next.
func CreateNetwork(opts NewNetwork, w io.Writer) error {
	setDefault(&opts.Admission, string(p2p.Open))
	setDefault(&opts.Out, opts.Name+networkSuffix)
	if !strings.HasSuffix(opts.Out, networkSuffix) {
		return fmt.Errorf("network file %q: its name must end in %s, by which kvasird knows it", opts.Out, networkSuffix)
	}
	if _, err := os.Lstat(opts.Out); err == nil {
		return fmt.Errorf("%s is there already: choose another file with --out", opts.Out)
	}
	// A key is made for what is a network but for the key.
	draft, err := newGenesis(opts, "")
	if err != nil {
		return err
	}
	var authority peer.ID
	if draft.Admission != p2p.Open {
		key, err := p2p.CreateIdentity(beside(opts.Out, authoritySuffix))
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("%s is there already: it may be of a network that is in use, so move it yourself or choose another file with --out", beside(opts.Out, authoritySuffix))
		}
		if err != nil {
			return err
		}
		authority = key.ID()
	}
	g, err := newGenesis(opts, authority)
	if err != nil {
		return err
	}
	uri := ""
	if g.Token != nil {
		if uri, err = createAuthenticator(opts.Out, g); err != nil {
			return err
		}
	}
	if err := writeNew(opts.Out, g.String()); err != nil {
		return err
	}
	return errors.Join(writeNextSteps(w, opts.Out, g), writeAuthenticator(w, opts.Out, uri))
}

// newGenesis checks everything in opts. With "" as authority it is a draft of a
// network that has one.
func newGenesis(opts NewNetwork, authority peer.ID) (*p2p.Genesis, error) {
	admission := p2p.Admission(opts.Admission)
	if authority == "" && (admission == p2p.Invitation || admission == p2p.Closed) {
		me, err := p2p.NewIdentity()
		if err != nil {
			return nil, err
		}
		authority = me.ID()
	}
	g, err := p2p.NewGenesis(opts.Name, admission, authority, time.Now())
	if err != nil {
		return nil, err
	}
	if opts.Replicas != 0 {
		g.TargetReplicas = opts.Replicas
	}
	g.Models = opts.Models
	if g.Token, err = newToken(opts); err != nil {
		return nil, err
	}
	g.Contact = p2p.Contact{Bootstrap: opts.Bootstrap, Relays: opts.Relays}
	// What the file says is checked as the file will be.
	if g, err = p2p.ParseGenesis([]byte(g.String())); err == nil {
		_, err = readToken(g)
	}
	return g, err
}

// writeNew writes a file that others may read and that is not there yet.
func writeNew(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Sync(), f.Close())
}

func writeNextSteps(w io.Writer, file string, g *p2p.Genesis) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Network %s is in %s.\n", g.ID(), file)
	if g.Admission == p2p.Open {
		fmt.Fprintf(&b, "\nIt is open: whoever has the file can come in and use it.\n\n"+
			"  here and on every other machine, once the file is there:\n    kvasird run --network %s\n", file)
	} else {
		fmt.Fprintf(&b, "Its key, %s, lets people in and puts them out:\nkeep it on this machine, keep it secret, and keep a copy.\n\n"+
			"  here:\n    kvasird run --network %s\n"+
			"  for each of the others, a ticket to send along with %s:\n    kvasird network invite %s --for PEER-ID --infer\n"+
			"  there:\n    kvasird run --network %s --ticket TICKET\n",
			beside(file, authoritySuffix), file, filepath.Base(file), file, filepath.Base(file))
		fmt.Fprintf(&b, "\nPEER-ID is what kvasird says on the other machine when it is started without a ticket.\n")
		if g.Admission == p2p.Invitation {
			fmt.Fprintf(&b, "Without --for and --infer the ticket is for whoever has it, and is good for helping only.\n")
		}
	}
	if len(g.Contact.Bootstrap) == 0 {
		fmt.Fprintf(&b, "\nMachines on one LAN find each other. For others, add the address of a node that they\nreach to bootstrap in %s (kvasird prints it when it starts).\n", file)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// ShowNetwork says what a network file means.
func ShowNetwork(file string, w io.Writer) error {
	g, err := ReadNetwork(file)
	if err != nil {
		return err
	}
	who := map[p2p.Admission]string{
		p2p.Open:       "open: everybody",
		p2p.Invitation: "by invitation: whoever has a ticket",
		p2p.Closed:     fmt.Sprintf("closed: %d members, and tickets for one peer", len(g.Contact.Members)),
	}
	list := func(items []string, none string) string {
		if len(items) == 0 {
			return none
		}
		return strings.Join(items, "\n            ")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "network     %s\nadmission   %s\n", g.ID(), who[g.Admission])
	if g.Authority != "" {
		fmt.Fprintf(&b, "authority   %s\n", g.Authority)
	}
	fmt.Fprintf(&b, "created     %s\nreplicas    %d wanted of every expert\nmodels      %s\nbootstrap   %s\nrelays      %s\n",
		g.Created.Format(time.DateTime), g.TargetReplicas, list(g.Models, "any"), list(g.Contact.Bootstrap, "none"), list(g.Contact.Relays, "none"))
	showToken(&b, g)
	if g.Authority != "" {
		list, err := g.ReadRevocations(beside(file, revocationsSuffix))
		switch {
		case err != nil:
			return err
		case list == nil:
			fmt.Fprintf(&b, "revoked     nothing from here\n")
		default:
			fmt.Fprintf(&b, "revoked     %d tickets, %d peers (list %d)\n", len(list.Serials), len(list.Peers), list.Version)
		}
	}
	_, err = io.WriteString(w, b.String())
	return err
}

// NewTicket says what ticket to issue.
type NewTicket struct {
	File  string // network file
	Key   string // of the authority; "": beside the file
	For   string // peer id; "": for whoever has it
	Infer bool   // the right to have others compute for it
	Days  int    // that it is good for; 0: 365 for a peer, else 30
	Note  string // for people
}

// Invite issues a ticket: to out as one line, and to notes in words.
func Invite(opts NewTicket, out, notes io.Writer) error {
	g, key, err := openAuthority(opts.File, opts.Key)
	if err != nil {
		return err
	}
	now := time.Now()
	t := p2p.Ticket{Rights: p2p.Join, NotBefore: now, Note: opts.Note}
	if opts.Infer {
		t.Rights |= p2p.Infer
	}
	setDefault(&opts.Days, boundTicketDays)
	if opts.For != "" {
		if t.Subject, err = peer.Decode(opts.For); err != nil {
			return fmt.Errorf("peer id %q: want one like 12D3KooW…, as kvasird says it on that machine", opts.For)
		}
	} else if opts.Days == boundTicketDays {
		opts.Days = unboundTicketDays
	}
	if opts.Days < 1 || opts.Days > maxTicketDays {
		return fmt.Errorf("%d days: want 1 to %d", opts.Days, maxTicketDays)
	}
	t.Expires = now.Add(time.Duration(opts.Days) * 24 * time.Hour)
	text, err := g.IssueTicket(key, t)
	if err != nil {
		return err
	}
	issued, err := p2p.ParseTicket(text)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, text); err != nil {
		return err
	}
	who := "whoever has it, so send it with care"
	if t.Subject != "" {
		who = "peer " + t.Subject.String() + " alone"
	}
	_, err = fmt.Fprintf(notes, "This ticket is for %s, until %s: %s.\nThere:         kvasird run --network %s --ticket …\nTo take it back: kvasird network revoke %s %s\n",
		who, issued.Expires.Format("2006-01-02"), issued.Rights, filepath.Base(opts.File), opts.File, issued.Serial)
	return err
}

// openAuthority reads a network file and the key of its authority.
func openAuthority(file, keyFile string) (*p2p.Genesis, p2p.Identity, error) {
	g, err := ReadNetwork(file)
	if err != nil {
		return nil, p2p.Identity{}, err
	}
	if g.Authority == "" {
		return nil, p2p.Identity{}, fmt.Errorf("network %s is open: whoever has %s can come in, so there is nothing to sign", g.Name, file)
	}
	setDefault(&keyFile, beside(file, authoritySuffix))
	key, err := p2p.LoadIdentity(keyFile)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("the key of the network's authority is not at %s: it is on the machine where the network was created; name it with --key", keyFile)
	}
	return g, key, err
}

// Revocation says what to put out.
type Revocation struct {
	File string // network file
	Key  string // of the authority; "": beside the file
	What string // ticket, serial of one, or peer id
	Data string // state folder of the daemon on this machine, "": the default one
}

// RevokeMember makes the next revocation list, beside the network file, and gives
// it to the daemon on this machine if one runs, which tells the others.
func RevokeMember(ctx context.Context, opts Revocation, w io.Writer) error {
	g, key, err := openAuthority(opts.File, opts.Key)
	if err != nil {
		return err
	}
	serials, peers, err := whatToRevoke(g, opts.What)
	if err != nil {
		return err
	}
	cfg := Config{Data: opts.Data}
	if err := cfg.Validate(); err != nil {
		return err
	}
	cfg.Genesis = g
	path := beside(opts.File, revocationsSuffix)
	last, err := newestRevocations(g, path, cfg.revocationsPath())
	if err != nil {
		return err
	}
	list, err := g.Revoke(key, last, serials, peers)
	if err != nil {
		return err
	}
	if err := list.WriteFile(path); err != nil {
		return err
	}
	result, err := client.New(cfg.Control).Revoke(ctx, list.Bytes())
	switch {
	case errors.Is(err, client.ErrNoDaemon):
		_, err = fmt.Fprintf(w, "Revoked in %s. No daemon runs here: it is handed out when `kvasird run --network %s` starts on this machine.\n", path, opts.File)
	case err != nil:
		err = fmt.Errorf("it is in %s, but the daemon here did not take it: %w", path, err)
	default:
		_, err = fmt.Fprintf(w, "Revoked. The daemon here goes by it and has told %d peers, who tell the others.\n", result.Peers)
	}
	return err
}

// whatToRevoke reads a ticket, a serial or a peer id.
func whatToRevoke(g *p2p.Genesis, what string) ([]p2p.Serial, []peer.ID, error) {
	if strings.HasPrefix(what, "kvt") {
		t, err := p2p.ParseTicket(what)
		if err != nil {
			return nil, nil, err
		}
		if t.Network != g.ID() {
			return nil, nil, fmt.Errorf("the ticket is for network %s, and this is %s", t.Network, g.ID())
		}
		return []p2p.Serial{t.Serial}, nil, nil
	}
	if s, err := p2p.ParseSerial(what); err == nil {
		return []p2p.Serial{s}, nil, nil
	}
	id, err := peer.Decode(what)
	if err != nil {
		return nil, nil, fmt.Errorf("%q is neither a ticket (kvt1-…), nor the serial of one (32 hex digits), nor a peer id (12D3KooW…)", what)
	}
	return nil, []peer.ID{id}, nil
}

// newestRevocations is the list to go on from: a daemon may have got one that was
// made elsewhere.
func newestRevocations(g *p2p.Genesis, paths ...string) (*p2p.Revocations, error) {
	var newest *p2p.Revocations
	for _, path := range paths {
		list, err := g.ReadRevocations(path)
		if err != nil {
			return nil, err
		}
		if list != nil && (newest == nil || newest.Version < list.Version) {
			newest = list
		}
	}
	return newest, nil
}
