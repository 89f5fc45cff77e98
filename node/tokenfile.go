package node

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/node/api"
	"kvasird/p2p"
	"kvasird/settle"
	"kvasird/settle/govern"
)

// maxKeyText bounds what is read as a key or a sealed secret, in bytes.
const maxKeyText = 4 << 10

// newToken makes the token section of a new network; nil when nothing asks for one.
func newToken(opts NewNetwork) (*p2p.Token, error) {
	if len(opts.Token) == 0 {
		if opts.Devnet {
			return nil, errors.New("a devnet is a network with a token: say which with --token mint=… and so on")
		}
		return nil, nil
	}
	t := &p2p.Token{Program: tokenProgram, Decimals: -1, Threshold: 1, Devnet: opts.Devnet}
	seen := map[string]bool{}
	for _, s := range opts.Token {
		key, value, ok := strings.Cut(s, "=")
		if !ok || seen[key] {
			return nil, fmt.Errorf("token %q: want KEY=VALUE, each key once", s)
		}
		seen[key] = true
		if err := setToken(t, key, value); err != nil {
			return nil, err
		}
	}
	if t.Decimals < 0 {
		return nil, errors.New("token: decimals is missing: say how many the mint has")
	}
	if t.FirstPrice == 0 {
		p, err := readParameters(t)
		if err != nil {
			return nil, err
		}
		t.FirstPrice = 2 * p.FloorRaw // room below for it to fall, and above
	}
	if t.Settlement != "" {
		return t, nil
	}
	me, err := ownID(opts.Data)
	t.Settlement = me
	return t, err
}

// ownID is the peer id of the node of a state folder.
func ownID(data string) (peer.ID, error) {
	if data == "" {
		var err error
		if data, err = api.DefaultDataDir(); err != nil {
			return "", err
		}
	}
	me, err := p2p.LoadIdentity(filepath.Join(data, "identity.key"))
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("token: settlement is missing, and there is no node in %s that could settle: name a peer id, or start kvasird here once", data)
	}
	return me.ID(), err
}

// setToken sets a key of the section, or a parameter.
func setToken(t *p2p.Token, key, value string) error {
	texts := map[string]*string{"mint": &t.Mint, "token_program": &t.Program, "cluster": &t.Cluster, "vault_owner": &t.VaultOwner}
	lists := map[string]*[]string{"wallets": &t.Wallets, "operators": &t.Operators}
	counts := map[string]*int{"decimals": &t.Decimals, "threshold": &t.Threshold}
	if to := texts[key]; to != nil {
		*to = value
		return nil
	}
	if to := lists[key]; to != nil {
		*to = strings.Split(value, ",")
		return nil
	}
	if to := counts[key]; to != nil {
		n, err := strconv.ParseUint(value, 10, 8)
		if err != nil {
			return fmt.Errorf("token: %s = %q: want a small number", key, value)
		}
		*to = int(n)
		return nil
	}
	if key == "settlement" {
		var err error
		if t.Settlement, err = peer.Decode(value); err != nil {
			return fmt.Errorf("token: settlement = %q: want a peer id like 12D3KooW…", value)
		}
		return nil
	}
	known := append([]string{"mint", "token_program", "decimals", "cluster", "vault_owner", "settlement", "wallets", "threshold", "operators", "first_price"}, parameterNames()...)
	if _, err := settle.FieldByName(key); err != nil && key != "first_price" {
		return fmt.Errorf("token: there is no key or parameter %q%s", key, Suggest(key, known))
	}
	n, err := settle.ParseAmount(value)
	if err != nil {
		return fmt.Errorf("token: %s = %q: want a whole number", key, value)
	}
	if key == "first_price" {
		t.FirstPrice = uint64(n)
		return nil
	}
	if t.Parameters == nil {
		t.Parameters = map[string]uint64{}
	}
	t.Parameters[key] = uint64(n)
	return nil
}

// createAuthenticator makes the secret that governance asks codes of, beside the network
// file, and returns it in the form that apps take. It is kept sealed only.
func createAuthenticator(file string, g *p2p.Genesis) (uri string, err error) {
	for _, suffix := range []string{authenticatorSuffix, authenticatorKeySuffix} {
		if _, err := os.Lstat(beside(file, suffix)); err == nil {
			return "", fmt.Errorf("%s is there already: it may be of a network that is in use, so move it yourself or choose another file with --out", beside(file, suffix))
		}
	}
	var key [32]byte
	rand.Read(key[:]) // it never fails
	text, sealed, err := govern.NewSecret(rand.Reader, key, g.Hash())
	if err != nil {
		return "", err
	}
	if err := writeSecret(beside(file, authenticatorKeySuffix), key[:]); err != nil {
		return "", err
	}
	if err := writeSecret(beside(file, authenticatorSuffix), sealed); err != nil {
		return "", err
	}
	values := url.Values{"secret": {text}, "issuer": {"kvasir"}, "algorithm": {"SHA1"}, "digits": {"6"}, "period": {"30"}}
	return "otpauth://totp/kvasir:" + g.Name + "?" + values.Encode(), nil
}

// writeSecret writes a new file that nobody else may read, as a line of hexadecimal
// digits.
func writeSecret(path string, secret []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, hex.EncodeToString(secret))
	return errors.Join(err, f.Sync(), f.Close())
}

// readPrivate reads a file that nobody else may read.
func readPrivate(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if perm := info.Mode().Perm(); !info.Mode().IsRegular() || perm&0o077 != 0 {
		return nil, fmt.Errorf("%s has mode %v, so others may read it: run chmod 600 %s", path, info.Mode(), path)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxKeyText+1))
	if err == nil && len(text) > maxKeyText {
		err = fmt.Errorf("%s is larger than %d bytes: it is no key", path, maxKeyText)
	}
	return text, err
}

// readSecret reads what writeSecret wrote.
func readSecret(path string) ([]byte, error) {
	text, err := readPrivate(path)
	if err != nil {
		return nil, err
	}
	secret, err := hex.DecodeString(strings.TrimSuffix(string(text), "\n"))
	if err != nil {
		return nil, fmt.Errorf("%s is not a line of hexadecimal digits", path)
	}
	return secret, nil
}

// writeAuthenticator tells the operator the secret, this once.
func writeAuthenticator(w io.Writer, file, uri string) error {
	if uri == "" {
		return nil
	}
	_, err := fmt.Fprintf(w, "\nParameters change by the signatures of its wallets and a code of an authenticator app.\nGive the app this, now: it is not shown again.\n  %s\n"+
		"The node that settles needs %s and %s.\nIt also needs a [settle] table in its kvasird.toml, and --role settle.\n",
		uri, beside(file, authenticatorSuffix), beside(file, authenticatorKeySuffix))
	return err
}

// showToken says what the token section means.
func showToken(b *strings.Builder, g *p2p.Genesis) {
	t := g.Token
	if t == nil {
		fmt.Fprintf(b, "token       none: nothing is paid\n")
		return
	}
	program, kind := "Token", ""
	if t.Program == token2022Program {
		program = "Token-2022"
	}
	if t.Devnet {
		kind = ", devnet"
	}
	list := func(items []string) string { return strings.Join(items, "\n            ") }
	fmt.Fprintf(b, "token       mint %s, %d decimals, %s%s\ncluster     %s\nvault of    %s\nsettles     %s\n",
		t.Mint, t.Decimals, program, kind, t.Cluster, t.VaultOwner, t.Settlement)
	fmt.Fprintf(b, "governed by %s\n            %d of them sign a change\nfirst price %d\n", list(t.Wallets), t.Threshold, t.FirstPrice)
	if len(t.Operators) > 0 {
		fmt.Fprintf(b, "operators   %s\n", list(t.Operators))
	}
	var changed []string
	p, err := readParameters(t)
	for _, f := range settle.Fields() {
		if err == nil && f.Get(p) != f.Default {
			changed = append(changed, fmt.Sprintf("%s = %d %s (default %d)", f.Name, f.Get(p), f.Unit, f.Default))
		}
	}
	if len(changed) > 0 {
		fmt.Fprintf(b, "parameters  %s\n", list(changed))
	}
}
