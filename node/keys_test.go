package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvasird/node/api"
	"kvasird/node/gateway"
)

func openTestKeys(t *testing.T, dir string) *keyBook {
	t.Helper()
	b, err := openKeys(filepath.Join(dir, keysName), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestWhoseKeySpends: an admin's and one that was made for it, also after a restart.
func TestWhoseKeySpends(t *testing.T) {
	dir := t.TempDir()
	b := openTestKeys(t, dir)
	secrets := map[string]bool{}
	for _, k := range []api.NewKey{{Name: "admin", Admin: true}, {Name: "spender", Spend: true}, {Name: "user"}} {
		secrets[must(b.add(k))(t).Secret] = k.Name != "user"
	}
	for range 2 {
		for secret, want := range secrets {
			if g, err := b.ring.Admit(secret); err != nil || g.Spend != want {
				t.Errorf("%s: %v, %v", g.Owner, g.Spend, err)
			}
		}
		b = openTestKeys(t, dir)
	}
}

// TestKeyBook: keys hold at once and after a restart, and what is kept of them is
// no key.
func TestKeyBook(t *testing.T) {
	dir := t.TempDir()
	b := openTestKeys(t, dir)
	if b.count() != 0 || len(b.all()) != 0 {
		t.Errorf("keys from nothing: %+v", b.all())
	}
	limits := api.KeyLimits{RequestsPerMinute: 5, TokensPerMinute: 100, Concurrent: 1}
	secrets := map[string]string{}
	for _, name := range []string{"beta", "alpha", "Gamma.1_x-"} {
		made, err := b.add(api.NewKey{Name: name, KeyLimits: limits})
		if err != nil || made.Key.Name != name || made.Key.KeyLimits != limits || len(made.Secret) < len(secretPrefix)+40 {
			t.Fatalf("%s: %+v, %v", name, made, err)
		}
		secrets[name] = made.Secret
	}
	var e *api.Error
	if _, err := b.add(api.NewKey{Name: "alpha"}); !errors.As(err, &e) || e.Code != api.CodeBadRequest || !strings.Contains(e.Message, "kvasir keys revoke alpha") {
		t.Errorf("a second alpha: %v", err)
	}
	if _, err := b.revoke("alhpa"); !errors.As(err, &e) || e.Code.HTTPStatus() != http.StatusNotFound || !strings.Contains(e.Message, `"alpha"`) {
		t.Errorf("an unknown key: %v", err)
	}
	info, err := os.Stat(filepath.Join(dir, keysName))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	for range 2 {
		list, err := json.Marshal(b.all())
		file, readErr := os.ReadFile(filepath.Join(dir, keysName))
		if err := errors.Join(err, readErr); err != nil {
			t.Fatal(err)
		}
		if want := `[{"name":"Gamma.1_x-",`; !strings.HasPrefix(string(list), want) || strings.Contains(string(list), "hash") {
			t.Errorf("list %s", list)
		}
		for name, secret := range secrets {
			if strings.Contains(string(file)+string(list), secret[len(secretPrefix):]) {
				t.Errorf("the key %s is kept as it is", name)
			}
			grant, err := b.ring.Admit(secret)
			if err != nil || grant.Owner != name {
				t.Errorf("%s: %+v, %v", name, grant, err)
				continue
			}
			if _, err := b.ring.Admit(secret); err == nil {
				t.Errorf("%s: two at once", name)
			}
			grant.Done(1)
		}
		b = openTestKeys(t, dir)
	}
	if left, err := b.revoke("alpha"); left != 2 || err != nil {
		t.Errorf("left %d, %v", left, err)
	}
	for _, b := range []*keyBook{b, openTestKeys(t, dir)} {
		var unknown *gateway.KeyError
		if _, err := b.ring.Admit(secrets["alpha"]); !errors.As(err, &unknown) {
			t.Errorf("a revoked key: %v", err)
		}
	}
	os.RemoveAll(dir) // a change that cannot be written does not hold
	if _, err := b.revoke("beta"); err == nil || b.count() != 2 {
		t.Errorf("revoked without a file: %v, %d keys", err, b.count())
	}
	if grant, err := b.ring.Admit(secrets["beta"]); err != nil {
		t.Errorf("%+v, %v", grant, err)
	}
}

func TestKeyRefused(t *testing.T) {
	b := openTestKeys(t, t.TempDir())
	for _, tt := range []struct {
		key  api.NewKey
		want string
	}{
		{api.NewKey{}, "want 1 to 64"},
		{api.NewKey{Name: "a/b"}, "want 1 to 64"},
		{api.NewKey{Name: "-a"}, "beginning with a letter"},
		{api.NewKey{Name: strings.Repeat("a", 65)}, "want 1 to 64"},
		{api.NewKey{Name: "a", KeyLimits: api.KeyLimits{RequestsPerMinute: -1}}, "-1 requests per minute"},
		{api.NewKey{Name: "a", KeyLimits: api.KeyLimits{TokensPerMinute: -1}}, "-1 tokens per minute"},
		{api.NewKey{Name: "a", KeyLimits: api.KeyLimits{Concurrent: maxKeyLimit + 1}}, "requests at once"},
	} {
		var e *api.Error
		if _, err := b.add(tt.key); !errors.As(err, &e) || e.Code != api.CodeBadRequest || !strings.Contains(e.Message, tt.want) {
			t.Errorf("%+v: %v, want %q", tt.key, err, tt.want)
		}
	}
	for i := range maxKeys {
		b.list = append(b.list, storedKey{Key: api.Key{Name: fmt.Sprintf("k%04d", i)}})
	}
	if _, err := b.add(api.NewKey{Name: "a"}); err == nil || !strings.Contains(err.Error(), "the most that are kept") {
		t.Errorf("one too many: %v", err)
	}
}

// TestKeysFileRefused has one text for each reason.
func TestKeysFileRefused(t *testing.T) {
	hash := strings.Repeat("ab", 32)
	key := `{"name":"a","created_unix":1,"hash":"` + hash + `"}`
	path := filepath.Join(t.TempDir(), keysName)
	for want, text := range map[string]string{
		"":                    `{"version":1,"keys":[` + key + `]}`,
		"EOF":                 ``,
		"unexpected EOF":      `{"version":1,`,
		"unknown field":       `{"version":1,"keys":[],"more":1}`,
		"something after":     `{"version":1,"keys":[]}{}`,
		"version 2":           `{"version":2,"keys":[]}`,
		"want 1 to 64":        `{"version":1,"keys":[{"hash":"` + hash + `"}]}`,
		"its hash is not 64":  `{"version":1,"keys":[{"name":"a","hash":"abcd"}]}`,
		"there twice":         `{"version":1,"keys":[` + key + "," + key + `]}`,
		"-1 requests at once": `{"version":1,"keys":[{"name":"a","concurrent":-1,"hash":"` + hash + `"}]}`,
		"1001 keys":           `{"version":1,"keys":[` + strings.Repeat("{},", maxKeys) + `{}]}`,
		"longer than":         `{"version":1,"keys":[]}` + strings.Repeat(" ", maxKeysFile),
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := openKeys(path, time.Now)
		if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path)) {
			t.Errorf("%.60s: %v, want %q", text, err, want)
		}
	}
}

func FuzzParseKeys(f *testing.F) {
	f.Add([]byte(`{"version":1,"keys":[{"name":"a","created_unix":1,"hash":"` + strings.Repeat("ab", 32) + `"}]}`))
	f.Add([]byte(`{"version":1,"keys":null}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		list, err := parseKeys(text)
		if err != nil {
			return
		}
		again, err := json.Marshal(keysFile{Version: keysVersion, Keys: list})
		if err != nil {
			t.Fatal(err)
		}
		if twice, err := parseKeys(again); err != nil || len(twice) != len(list) {
			t.Errorf("%s: read again: %v", again, err)
		}
	})
}
