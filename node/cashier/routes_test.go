package cashier

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"

	"kvasird/settle"
)

const testSecret = "the token"

// askRoutes sends a request to the HTTP door of s.
func askRoutes(s Service, secret, method, path, body string) *httptest.ResponseRecorder {
	mux := http.NewServeMux()
	for pattern, h := range Routes(RoutesConfig{Service: s, Node: keyOf("me"), Allowed: func(s string) bool { return s == testSecret }}) {
		mux.Handle(pattern, h)
	}
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	if secret != "" {
		r.Header.Set(TokenHeader, secret)
	}
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, r)
	return w
}

var (
	goodSignature = settle.Signature{1, 2, 3}.String()
	goodID        = strings.Repeat("0a", 32)
	goodMove      = fmt.Sprintf(`{"id": %q, "amount": "1500"}`, goodID)
	goodStake     = fmt.Sprintf(`{"signature": %q, "owner": %q, "amount": "1500"}`, goodSignature, keyOf("w"))
	goodComplaint = fmt.Sprintf(`{"request": %q, "amount": "7", "format": "v1", "signature": %q}`, goodID[:32], goodSignature)
	goodRegister  = fmt.Sprintf(`{"wallet": %q, "spend": true, "since": 5, "format": "v0", "signature": %q, "role": "hub", "tier": 9}`, keyOf("w"), goodSignature)
)

func TestRoutes(t *testing.T) {
	var id settle.Hash
	for i := range id {
		id[i] = 10
	}
	for _, tt := range []struct {
		method, path, body string
		want               any
	}{
		{"POST", "/api/stake", goodStake, Deposit{settle.Signature{1, 2, 3}, keyOf("w"), 1500, true}},
		{"POST", "/api/unstake", goodMove, Move{id, 1500}},
		{"POST", "/api/claim", goodMove, Move{id, 1500}},
		{"POST", "/api/claim", fmt.Sprintf(`{"id": %q, "amount": "18446744073709551615"}`, goodID), Move{id, 1<<64 - 1}},
		{"POST", "/api/insurance/claim", fmt.Sprintf(`{"request": %q, "amount": "7"}`, goodID[:32]), Complaint{ID: settle.QuoteID(id[:16]), Amount: 7}},
		{"POST", "/api/insurance/claim", goodComplaint, Complaint{settle.QuoteID(id[:16]), 7, "v1", settle.Signature{1, 2, 3}}},
		{"GET", "/api/ledger/" + keyOf("w").String(), "", keyOf("w")},
		{"POST", "/api/node/register", goodRegister, Link{keyOf("w"), true, 5, "v0", settle.Signature{1, 2, 3}}},
		// Whatever a node says of itself, what is asked is what is known of it.
		{"POST", "/api/node/heartbeat", `{}`, keyOf("me")},
		{"POST", "/api/node/heartbeat", `{"role": "gateway", "tier": "gold", "performance": 1e9}`, keyOf("me")},
		{"POST", "/api/node/contribution", `{"units": 1000000000, "layers": [0, 48]}`, keyOf("me")},
	} {
		var got []any
		w := askRoutes(&echo{got: &got}, testSecret, tt.method, tt.path, tt.body)
		if w.Code != http.StatusOK || len(got) != 1 || !reflect.DeepEqual(got[0], tt.want) {
			t.Errorf("%s %s %s: %d %s, asked %+v", tt.method, tt.path, tt.body, w.Code, w.Body, got)
		}
	}
}

// Without the token nothing is asked of the settlement: on a LAN where nobody is asked for a
// key too.
func TestRoutesNeedToken(t *testing.T) {
	for path, body := range map[string]string{
		"POST /api/insurance/claim": goodComplaint, "POST /api/stake": goodStake, "POST /api/unstake": goodMove, "POST /api/claim": goodMove, "GET /api/ledger/" + keyOf("w").String(): "",
		"POST /api/node/register": goodRegister, "POST /api/node/heartbeat": `{"tier": 9}`, "POST /api/node/contribution": `{"units": 1e9}`,
	} {
		method, path, _ := strings.Cut(path, " ")
		for _, secret := range []string{"", "the tokem", "the token "} {
			var got []any
			if w := askRoutes(&echo{got: &got}, secret, method, path, body); w.Code != http.StatusForbidden || len(got) > 0 {
				t.Errorf("%s with %q: %d, asked %v", path, secret, w.Code, got)
			}
		}
	}
	for _, header := range []string{"Authorization: Bearer " + testSecret, "Authorization: bearer  " + testSecret, "X-Api-Key: " + testSecret} {
		name, value, _ := strings.Cut(header, ": ")
		r := httptest.NewRequest("GET", "/", nil)
		r.Header.Set(name, value)
		if got := secretOf(r); got != testSecret {
			t.Errorf("%s: %q", header, got)
		}
	}
}

func TestRoutesRefuse(t *testing.T) {
	move := func(amount string) string { return fmt.Sprintf(`{"id": %q, "amount": %s}`, goodID, amount) }
	stake := func(field, value string) string {
		return strings.Replace(goodStake, `"`+field+`": "`, `"`+field+`": "`+value, 1)
	}
	for name, tt := range map[string]struct{ path, body, field string }{
		"exponent":            {"/api/claim", move(`"1e3"`), "amount"},
		"plus":                {"/api/claim", move(`"+1"`), "amount"},
		"leading zero":        {"/api/claim", move(`"01"`), "amount"},
		"minus":               {"/api/claim", move(`"-1"`), "amount"},
		"space":               {"/api/claim", move(`" 1"`), "amount"},
		"point":               {"/api/claim", move(`"1.0"`), "amount"},
		"empty amount":        {"/api/claim", move(`""`), "amount"},
		"u64 overflow":        {"/api/claim", move(`"18446744073709551616"`), "amount"},
		"a number":            {"/api/claim", move(`1500`), "amount"},
		"null":                {"/api/unstake", move(`null`), "amount"},
		"no amount":           {"/api/unstake", fmt.Sprintf(`{"id": %q}`, goodID), "amount"},
		"short id":            {"/api/unstake", `{"id": "0a", "amount": "1"}`, "id"},
		"id in capitals":      {"/api/unstake", strings.ToUpper(goodID[:2]) + goodMove, "body"},
		"capitals":            {"/api/unstake", strings.Replace(goodMove, "0a", "0A", 1), "id"},
		"twice":               {"/api/unstake", strings.Replace(goodMove, "{", `{"amount": "1",`, 1), "body"},
		"signature, a space":  {"/api/stake", stake("signature", " "), "signature"},
		"signature, longer":   {"/api/stake", stake("signature", "zzz"), "signature"},
		"signature, shorter":  {"/api/stake", strings.Replace(goodStake, goodSignature, goodSignature[1:], 1), "signature"},
		"signature, ones":     {"/api/stake", stake("signature", "1"), "signature"},
		"signature, long":     {"/api/stake", stake("signature", strings.Repeat("2", 9000)), "signature"},
		"owner":               {"/api/stake", stake("owner", "0"), "owner"},
		"unknown field":       {"/api/stake", strings.Replace(goodStake, "{", `{"stake": false,`, 1), "stake"},
		"no signature":        {"/api/node/register", strings.Replace(goodRegister, `"signature"`, `"tier"`, 1), "body"},
		"since":               {"/api/node/register", strings.Replace(goodRegister, ": 5", ": -5", 1), "since"},
		"spend":               {"/api/node/register", strings.Replace(goodRegister, "true", `"yes"`, 1), "spend"},
		"a long report":       {"/api/node/contribution", `{"units": "` + strings.Repeat("9", maxReported) + `"}`, "units"},
		"a long request":      {"/api/insurance/claim", strings.Replace(goodComplaint, `": "0a`, `": "0a0a`, 1), "request"},
		"no request":          {"/api/insurance/claim", `{"amount": "7"}`, "request"},
		"a wallet":            {"/api/insurance/claim", strings.Replace(goodComplaint, "{", `{"wallet": "0",`, 1), "wallet"},
		"reward":              {"/api/node/contribution", `{"reward": 5}`, "reward"},
		"a list":              {"/api/claim", `[]`, "body"},
		"nothing":             {"/api/claim", ``, "body"},
		"half":                {"/api/claim", `{"id": "`, "body"},
		"not closed":          {"/api/claim", strings.TrimSuffix(goodMove, "}"), "body"},
		"more behind":         {"/api/claim", goodMove + `{}`, "body"},
		"oversized":           {"/api/claim", goodMove + strings.Repeat(" ", maxBody), "body"},
		"oversized in a name": {"/api/claim", `{"` + strings.Repeat("a", maxBody) + `": 1}`, "body"},
	} {
		t.Run(name, func(t *testing.T) {
			var got []any
			w := askRoutes(&echo{got: &got}, testSecret, "POST", tt.path, tt.body)
			var reply struct {
				Error struct{ Field, Message string }
			}
			if err := json.Unmarshal(w.Body.Bytes(), &reply); err != nil {
				t.Fatal(err)
			}
			if w.Code != http.StatusBadRequest || reply.Error.Field != tt.field || reply.Error.Message == "" || len(got) > 0 {
				t.Errorf("%d %.200s, asked %v, want 400 and the field %s", w.Code, w.Body, got, tt.field)
			}
		})
	}
	if w := askRoutes(&echo{}, testSecret, "GET", "/api/ledger/0", ""); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), `"field":"owner"`) {
		t.Errorf("an owner that is none: %d %s", w.Code, w.Body)
	}
}

func TestRoutesTellRefusals(t *testing.T) {
	for _, tt := range []struct {
		err    error
		status int
		want   string
	}{
		{&Refusal{Code: CodeFunds, Text: "too little"}, 402, "too little"},
		{&Refusal{Code: CodeInvalid, Text: "no"}, 402, "payment_invalid"},
		{&Refusal{Code: CodeNotFound, Text: "none"}, 404, "none"},
		{&Refusal{Code: CodeState, Text: "running"}, 409, "running"},
		{&Refusal{Code: CodeRights, Text: "not yours"}, 403, "not yours"},
		{&Refusal{Code: CodeBusy, Text: "often", Retry: 7}, 429, "often"},
		{&Refusal{Code: CodeNotYet, Text: "soon", Retry: 7}, 503, "soon"},
		{fmt.Errorf("%w: 10.0.0.1", ErrAway), 503, "cannot be reached"},
		{errors.New("/var/secret"), 500, "its log"},
	} {
		w := askRoutes(&echo{err: tt.err}, testSecret, "POST", "/api/claim", goodMove)
		if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.want) || strings.Contains(w.Body.String(), "secret") {
			t.Errorf("%v: %d %s", tt.err, w.Code, w.Body)
		}
		if retry := w.Header().Get("Retry-After"); (retry != "") != (tt.status == 429 || tt.status == 503) {
			t.Errorf("%v: Retry-After %q", tt.err, retry)
		}
	}
}

func FuzzForm(f *testing.F) {
	for _, s := range []string{goodMove, goodStake, goodRegister, `{"amount": null}`, `{"amount":"1","amount":"2"}`, `{}{}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		got, err := parseForm(body)
		if err != nil {
			return
		}
		var m Move
		got.must("id", &m.ID)
		got.must("amount", &m.Amount)
		if got.done() == nil {
			var strict struct {
				ID     string `json:"id"`
				Amount string `json:"amount"`
			}
			if err := json.Unmarshal(body, &strict); err != nil || strict.Amount != m.Amount.String() {
				t.Errorf("%s: %+v, %v", body, m, err)
			}
		}
	})
}
