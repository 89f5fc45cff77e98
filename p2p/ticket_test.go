package p2p

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

var (
	ticketTime = time.Unix(1767366245, 0).UTC()
	bearerSeed = bytes.Repeat([]byte{9}, 32)
)

// invitationOnly is a network whose authority is seedIdentity(1).
func invitationOnly(t testing.TB) *Genesis {
	g := testGenesis(t)
	g.Authority = seedIdentity(t, 1).ID()
	return g
}

func testTicket(g *Genesis, subject peer.ID) Ticket {
	t := Ticket{
		Network: g.ID(), Serial: Serial{15: 7}, Rights: Join, Subject: subject,
		NotBefore: ticketTime, Expires: ticketTime.Add(24 * time.Hour), Note: "Ada",
	}
	if subject != "" {
		t.Rights |= Infer
	}
	return t
}

// shown is what the hello of a peer shows of a ticket.
func shown(t testing.TB, by Identity, ticket Ticket, holder Identity) []byte {
	t.Helper()
	text, err := ticket.sign(by, bearerSeed)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := presentTicket(text, holder)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestTicketLiteralBytes(t *testing.T) {
	g := invitationOnly(t)
	me := seedIdentity(t, 2)
	common := "01 01 02 7819" + hex.EncodeToString([]byte(g.ID())) + "03 50 00000000000000000000000000000007"
	tests := []struct {
		name, body  string
		text, shown string // their sums: signatures are long
		ticket      Ticket
	}{
		{"for whoever has it", "a8" + common + "04 01 06 1a 6957de65 07 1a 69592fe5 08 63 416461 09 5820 " +
			"fd1724385aa0c75b64fb78cd602fa1d991fdebf76b13c58ed702eac835e9f618", "41f0451f8299e105", "5c9a2ccee56cdddf", testTicket(g, "")},
		{"for a peer", "a8" + common + "04 03 05 5826" + hex.EncodeToString([]byte(me.ID())) + "06 1a 6957de65 07 1a 69592fe5 08 63 416461",
			"cbd92f29afb91750", "4ef36ad9318485db", testTicket(g, me.ID())},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			text, err := tt.ticket.sign(seedIdentity(t, 1), bearerSeed)
			if err != nil {
				t.Fatal(err)
			}
			st, err := parseTicket(text)
			if err != nil || !bytes.Equal(st.body, unhex(t, tt.body)) {
				t.Errorf("body\n got %x\nwant %x (%v)", st.body, unhex(t, tt.body), err)
			}
			if sum := shortSum(text); sum != tt.text {
				t.Errorf("text %s has the sum %s, want %s", text, sum, tt.text)
			}
			if sum := shortSum(string(shown(t, seedIdentity(t, 1), tt.ticket, me))); sum != tt.shown {
				t.Errorf("what a hello shows has the sum %s, want %s", sum, tt.shown)
			}
		})
	}
}

// Whatever is wrong, the reason says so and what to do.
func TestAdmit(t *testing.T) {
	authority, me, other := seedIdentity(t, 1), seedIdentity(t, 2), seedIdentity(t, 3)
	g := invitationOnly(t)
	open, closed, elsewhere := *g, *g, *g
	open.Admission, closed.Admission, elsewhere.Name = Open, Closed, "away"
	closed.Contact.Members = []peer.ID{other.ID()}
	revoked, err := g.Revoke(authority, nil, []Serial{{15: 7}}, []peer.ID{other.ID()})
	if err != nil {
		t.Fatal(err)
	}
	ticket := func(g *Genesis, by Identity, subject peer.ID, change func(*Ticket)) []byte {
		tk := testTicket(g, subject)
		if change != nil {
			change(&tk)
		}
		return shown(t, by, tk, me)
	}
	bearer, bound := ticket(g, authority, "", nil), ticket(g, authority, me.ID(), nil)
	flip := func(b []byte, at int) []byte {
		b = bytes.Clone(b)
		b[(at+len(b))%len(b)] ^= 1
		return b
	}
	now := ticketTime.Add(time.Hour)
	tests := []struct {
		name    string
		g       *Genesis
		id      peer.ID
		ticket  []byte
		revoked *Revocations
		now     time.Time
		rights  Rights
		got     string // of the refusal
		want    string
	}{
		{"no network file", nil, me.ID(), nil, nil, now, Join | Infer, "", ""},
		{"open", &open, me.ID(), nil, nil, now, Join | Infer, "", ""},
		{"open, any ticket", &open, me.ID(), []byte("x"), nil, now, Join | Infer, "", ""},
		{"open, put out", &open, other.ID(), nil, revoked, now, 0, "revoked for this peer", "put it out"},
		{"authority", g, authority.ID(), nil, revoked, now, Join | Infer, "", ""},
		{"whoever has it", g, me.ID(), bearer, nil, now, Join, "", ""},
		{"whoever has it can not infer", g, me.ID(), ticket(g, authority, "", func(k *Ticket) { k.Rights |= Infer }), nil, now, Join, "", ""},
		{"for this peer", g, me.ID(), bound, nil, now, Join | Infer, "", ""},
		{"join alone", g, me.ID(), ticket(g, authority, me.ID(), func(k *Ticket) { k.Rights = Join }), nil, now, Join, "", ""},
		{"rights of a later version", g, me.ID(), ticket(g, authority, me.ID(), func(k *Ticket) { k.Rights = 0x81 }), nil, now, Join, "", ""},
		{"just before the end", g, me.ID(), bound, nil, ticketTime.Add(24*time.Hour - 1), Join | Infer, "", ""},
		{"clocks differ", g, me.ID(), bound, nil, ticketTime.Add(-ticketSkew), Join | Infer, "", ""},
		{"missing", g, me.ID(), nil, nil, now, 0, "missing", "ask for a ticket for " + me.ID().String() + " and start with --ticket"},
		{"expired", g, me.ID(), bound, nil, ticketTime.Add(24 * time.Hour), 0, "expired on 2026-01-03 15:04:05 UTC", "new ticket"},
		{"not yet", g, me.ID(), bound, nil, ticketTime.Add(-ticketSkew - 1), 0, "valid from 2026-01-02 15:04:05 UTC on", "clock"},
		{"revoked", g, me.ID(), bearer, revoked, now, 0, "revoked", "new ticket"},
		{"peer revoked", g, other.ID(), shown(t, authority, testTicket(g, other.ID()), other), revoked, now, 0, "revoked for this peer", "put it out"},
		{"for another peer", g, other.ID(), bound, nil, now, 0, "for another peer", other.ID().String()},
		{"for another network", g, me.ID(), ticket(&elsewhere, authority, me.ID(), nil), nil, now, 0, "for network " + elsewhere.ID(), g.ID()},
		{"forged", g, me.ID(), ticket(g, other, me.ID(), nil), nil, now, 0, "forged", "not signed by this network's authority"},
		{"forged for all", g, me.ID(), ticket(g, other, "", nil), nil, now, 0, "forged", "not signed by this network's authority"},
		{"changed signature", g, me.ID(), flip(bound, -1), nil, now, 0, "forged", "not signed"},
		{"changed rights", g, me.ID(), bytes.Replace(bound, unhex(t, "04 03"), unhex(t, "04 01"), 1), nil, now, 0, "forged", "not signed"},
		{"taken from another's hello", g, other.ID(), bearer, nil, now, 0, "forged", "whoever shows it does not have it"},
		{"without a proof", g, me.ID(), bearer[:len(bearer)-signatureSize], nil, now, 0, "damaged", "copy all"},
		{"with its seed", g, me.ID(), append(bearer[:len(bearer)-signatureSize:len(bearer)-signatureSize], bearerSeed...), nil, now, 0, "damaged", "copy all"},
		{"cut", g, me.ID(), bound[:40], nil, now, 0, "damaged", "copy all"},
		{"too long", g, me.ID(), make([]byte, maxTicket+1), nil, now, 0, "at most 512", "copy all"},
		{"closed, a member", &closed, other.ID(), nil, nil, now, Join | Infer, "", ""},
		{"closed, no member", &closed, me.ID(), nil, nil, now, 0, "missing", "ask"},
		{"closed, for this peer", &closed, me.ID(), ticket(&closed, authority, me.ID(), nil), nil, now, Join | Infer, "", ""},
		{"closed, for whoever has it", &closed, me.ID(), ticket(&closed, authority, "", nil), nil, now, 0, "for no peer in particular", me.ID().String()},
		{"closed, a member put out", &closed, other.ID(), nil, revoked, now, 0, "revoked for this peer", "put it out"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, v := tt.g.admit(tt.id, tt.ticket, tt.revoked, tt.now)
			if a.rights != tt.rights || (v.Field == "") != (tt.got == "") || !strings.Contains(v.Got, tt.got) || !strings.Contains(v.Want, tt.want) {
				t.Errorf("rights %v, refusal %+v, want %v, %q, %q", a.rights, v, tt.rights, tt.got, tt.want)
			}
			if b, err := encodeVerdict(v); err != nil {
				t.Error(err)
			} else if back, err := decodeVerdict(b); err != nil || back != v {
				t.Errorf("on the wire %+v becomes %+v, %v", v, back, err)
			}
		})
	}
}

func TestIssueTicket(t *testing.T) {
	authority, me := seedIdentity(t, 1), seedIdentity(t, 2)
	g := invitationOnly(t)
	open := *g
	open.Admission, open.Authority = Open, ""
	good := testTicket(g, me.ID())
	text, err := g.IssueTicket(authority, good)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseTicket(text)
	if err != nil || got.Serial == good.Serial || got.Serial == (Serial{}) {
		t.Errorf("%+v, %v", got, err)
	}
	if rights, err := g.CheckTicket(text, me, ticketTime); err != nil || rights != Join|Infer {
		t.Errorf("check: %v, %v", rights, err)
	}
	if _, err := g.CheckTicket(text, authority, ticketTime.Add(-time.Hour)); err != nil {
		t.Errorf("the authority needs no ticket: %v", err)
	}
	if _, err := g.CheckTicket(text, seedIdentity(t, 3), ticketTime); err == nil || !strings.Contains(err.Error(), "for another peer: ask for one for 12D3") {
		t.Errorf("check for another peer: %v", err)
	}
	tests := []struct {
		name   string
		g      *Genesis
		key    Identity
		change func(*Ticket)
		want   string
	}{
		{"infer for whoever has it", g, authority, func(k *Ticket) { k.Subject = "" }, "must be for one peer"},
		{"another key", g, me, func(*Ticket) {}, "this is the key of " + me.ID().String()},
		{"open network", &open, authority, func(*Ticket) {}, "needs no tickets"},
		{"no right to join", g, authority, func(k *Ticket) { k.Rights = Infer }, "right to join"},
		{"never valid", g, authority, func(k *Ticket) { k.Expires = k.NotBefore }, "at no time valid"},
		{"before 1970", g, authority, func(k *Ticket) { k.NotBefore = time.Unix(-1, 0) }, "at no time valid"},
		{"for ever", g, authority, func(k *Ticket) { k.Expires = time.Unix(maxUnix+1, 0) }, "at no time valid"},
		{"subject", g, authority, func(k *Ticket) { k.Subject = "me" }, "no peer id"},
		{"note", g, authority, func(k *Ticket) { k.Note = "\x1b[2J" }, "not printable"},
		{"long note", g, authority, func(k *Ticket) { k.Note = strings.Repeat("a", maxText+1) }, "at most 128"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tk := good
			tt.change(&tk)
			if text, err := tt.g.IssueTicket(tt.key, tk); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s, %v, want an error with %q", text, err, tt.want)
			}
		})
	}
}

func TestParseTicketRefuses(t *testing.T) {
	g, authority := invitationOnly(t), seedIdentity(t, 1)
	tk := testTicket(g, "")
	text, err := tk.sign(authority, bearerSeed)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(text, ticketPrefix))
	if err != nil {
		t.Fatal(err)
	}
	changed := func(old, new string) string {
		b := bytes.Replace(raw, unhex(t, old), unhex(t, new), 1)
		if bytes.Equal(b, raw) {
			t.Fatalf("%s is not in the ticket", old)
		}
		return ticketPrefix + base64.RawURLEncoding.EncodeToString(b)
	}
	tests := []struct{ name, text, want string }{
		{"empty", "", "begins with kvt1-"},
		{"another version", "kvt2-" + text[5:], "begins with kvt1-"},
		{"nothing in it", ticketPrefix, "damaged"},
		{"not base64", text + "!", "damaged"},
		{"padding", text + "=", "damaged"},
		{"line end", text[:40] + "\n" + text[40:], "damaged"},
		{"stray bits", ticketPrefix + "AB", "damaged"},
		{"cut", text[:len(text)-4], "damaged"},
		{"longer", text + "AAAA", "damaged"},
		{"too long", ticketPrefix + strings.Repeat("A", 1000), "at most 512 bytes"},
		{"version", changed("01 01 02 78", "01 02 02 78"), "version 2"},
		{"no rights", changed("04 01 06", "04 00 06"), "right to join"},
		{"unknown key", changed("04 01 06", "0c 01 06"), "damaged"},
		{"long form of a number", changed("a8 01 01", "a8 01 18 01"), "not the encoding"},
		{"order of keys", changed("a8 01 01 02 78 19 "+hex.EncodeToString([]byte(g.ID())), "a8 02 78 19 "+hex.EncodeToString([]byte(g.ID()))+"01 01"), "not the encoding"},
		{"short serial", changed("03 50 00", "03 4f"), "serial"},
		{"time past the year 9999", changed("07 1a 69592fe5", "07 1b 7fffffffffffffff"), "time"},
		{"negative time", changed("07 1a 69592fe5", "07 3a 69592fe5"), "damaged"},
		{"short key", changed("09 58 20 fd", "09 58 1f"), "key of 32 bytes"},
		{"network", changed("686f6d65 2d", "486f6d65 2d"), "no network id"},
		{"note", changed("63 416461", "63 411b61"), "printable"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got, err := ParseTicket(tt.text); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%+v, %v, want an error with %q", got, err, tt.want)
			}
		})
	}
	// A seed that is not that of the ticket's key.
	bad := ticketPrefix + base64.RawURLEncoding.EncodeToString(append(raw[:len(raw)-1:len(raw)-1], 1))
	if _, err := presentTicket(bad, authority); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("another seed: %v", err)
	}
}

func FuzzTicket(f *testing.F) {
	authority, me := seedIdentity(f, 1), seedIdentity(f, 2)
	g := invitationOnly(f)
	for _, subject := range []peer.ID{"", me.ID()} {
		f.Add(shown(f, authority, testTicket(g, subject), me))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, tail := range []int{0, signatureSize} {
			st, err := decodeTicket(raw, tail)
			if err != nil {
				continue
			}
			body, err := st.encode()
			if err != nil || !bytes.Equal(body, st.body) {
				t.Fatalf("%x is read as %+v, which is %x, %v", raw, st.Ticket, body, err)
			}
		}
		a, v := g.admit(me.ID(), raw, nil, ticketTime)
		if (v.Field == "") != a.rights.Has(Join) {
			t.Fatalf("rights %v beside refusal %+v", a.rights, v)
		}
	})
}

// shortSum stands for long bytes.
func shortSum(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:8])
}
