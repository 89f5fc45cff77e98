package main

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"kvasird/node/api"
)

func TestKeys(t *testing.T) {
	var asked api.NewKey
	data := daemon(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.Method + r.URL.Path {
		case "GET" + api.PathKeys:
			json.NewEncoder(w).Encode([]api.Key{{Name: "web", KeyLimits: api.KeyLimits{RequestsPerMinute: 5}, CreatedUnix: 1}, {Name: "\x1b[2J"}})
		case "POST" + api.PathKeys:
			json.NewDecoder(r.Body).Decode(&asked)
			json.NewEncoder(w).Encode(api.CreatedKey{Key: api.Key{Name: asked.Name}, Secret: "sk-secret", Note: "It is open now."})
		case "POST" + api.PathRevokedKey:
			w.WriteHeader(http.StatusNotFound)
			json.NewEncoder(w).Encode(api.Failure{Error: &api.Error{Code: api.CodeNotFound, Message: "there is no key \"x\""}})
		}
	})
	status, out, errs := kvasir(t, "", "keys", "add", "--data", data, "web", "--requests-per-minute", "5", "--tokens-per-minute", "6", "--concurrent", "7")
	want := api.NewKey{Name: "web", KeyLimits: api.KeyLimits{RequestsPerMinute: 5, TokensPerMinute: 6, Concurrent: 7}}
	if status != exitOK || out != "sk-secret\n" || !strings.Contains(errs, "shown this once") || !strings.Contains(errs, "It is open now.") || asked != want {
		t.Errorf("add: status %d, out %q, err %q, asked %+v", status, out, errs, asked)
	}
	status, out, errs = kvasir(t, "", "keys", "list", "--data", data)
	if status != exitOK || errs != "" || !strings.Contains(out, "web ") || !strings.Contains(out, " 5 ") || strings.Contains(out, "\x1b") {
		t.Errorf("list: status %d, out %q, err %q", status, out, errs)
	}
	status, out, errs = kvasir(t, "", "keys", "revoke", "x", "--data", data)
	if status != exitFail || out != "" || errs != "kvasir: there is no key \"x\"\n" {
		t.Errorf("revoke: status %d, out %q, err %q", status, out, errs)
	}
	for _, args := range [][]string{{"keys", "add"}, {"keys", "add", "a", "b"}, {"keys", "revoke"}, {"keys", "list", "a"}, {"keys", "add", "a", "--concurrent", "x"}} {
		if status, _, _ := kvasir(t, "", args...); status != exitUsage {
			t.Errorf("%v: status %d", args, status)
		}
	}
}
