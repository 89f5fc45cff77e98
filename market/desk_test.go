package market

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

func reply(t *testing.T, v any, err error) string {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// specDesk has the three workers of the published example.
func specDesk(t *testing.T) *Desk {
	d := NewDesk(newTable(t, Policy{Target: 2}, modelA, oneLayer), nil)
	for worker, experts := range map[string]string{"A": "[0,128]", "B": "[128,256]", "C": "[0,128]"} {
		body := fmt.Sprintf(`{"worker":%q,"holdings":[{"layer":0,"experts":%s}]}`, worker, experts)
		if _, err := d.Coverage([]byte(body), "lan", t0); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func TestFixedExample(t *testing.T) {
	d := specDesk(t)
	got, err := d.Volunteer([]byte(`{"max_experts": 64}`), "", t0)
	want := `{"layer":0,"experts":[128,192],"scarcity":0.5,"replicas":1,"target":2}`
	if s := reply(t, got, err); s != want {
		t.Errorf("volunteer:\n got %s\nwant %s", s, want)
	}
	demand, err := d.Demand("", t0)
	want = `{"model":"` + modelA.String() + `","layers":1,"experts":256,"target_replicas":2,"backbones":0,"sources":0,"segments":[` +
		`{"layer":0,"experts":[0,128],"scarcity":0,"replicas":2,"target":2},` +
		`{"layer":0,"experts":[128,256],"scarcity":0.5,"replicas":1,"target":2}]}`
	if s := reply(t, demand, err); s != want {
		t.Errorf("demand:\n got %s\nwant %s", s, want)
	}
}

func TestDeskClaims(t *testing.T) {
	d := specDesk(t)
	first, err := d.Volunteer([]byte(`{"worker":"D","max_experts":64}`), "lan", t0)
	if err != nil {
		t.Fatal(err)
	}
	second, err := d.Volunteer([]byte(`{"worker":"E","max_experts":64}`), "lan", t0)
	if err != nil {
		t.Fatal(err)
	}
	if first.Experts == second.Experts || first.Scarcity != 0.5 || second.Scarcity != 0.5 {
		t.Errorf("two workers were given %v and %v", first, second)
	}
	var none *RequestError
	if got, err := d.Volunteer([]byte(`{"worker":"F","max_experts":64}`), "lan", t0); !errors.As(err, &none) || none.Status != 404 {
		t.Errorf("with all claimed: %v, %v", got, err)
	}
	later := t0.Add(claimLease)
	for _, w := range []string{"A", "B", "C"} {
		body := `{"worker":"` + w + `","holdings":[{"layer":0,"experts":[0,256]}]}`
		if w == "B" {
			body = `{"worker":"B","holdings":[]}`
		}
		if _, err := d.Coverage([]byte(body), "lan", later); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := d.Volunteer([]byte(`{"max_experts":64}`), "", later); err == nil {
		t.Errorf("after the leases and with two full workers: %v", got)
	}
	late := later.Add(heartbeat)
	if got, err := d.Volunteer([]byte(`{"max_experts":300}`), "", late); err != nil || got.Scarcity != 1 || got.Experts != [2]int{0, 256} {
		t.Errorf("after the heartbeats ended: %v, %v", got, err)
	}
}

func TestDeskCountsBytes(t *testing.T) {
	d := NewDesk(newTable(t, Policy{}, modelA, oneLayer), sized(100))
	if got, err := d.Volunteer([]byte(`{"max_bytes":1050,"max_experts":64}`), "", t0); err != nil || got.Experts != [2]int{0, 10} {
		t.Errorf("1,050 bytes for experts of 100: %+v, %v", got, err)
	}
	for _, sizes := range []Sizes{nil, sized(0), sized(2000)} {
		d := NewDesk(d.table, sizes)
		var none *RequestError
		if got, err := d.Volunteer([]byte(`{"max_bytes":1050}`), "", t0); !errors.As(err, &none) || none.Status != 404 {
			t.Errorf("experts that do not fit: %+v, %v", got, err)
		}
	}
}

func TestDeskRefuses(t *testing.T) {
	long := strings.Repeat("x", 200)
	for _, tt := range []struct {
		name   string
		call   func(d *Desk) error
		status int
	}{
		{"not json", volunteer(`max_experts`), 400},
		{"unknown field", volunteer(`{"max_expert":1}`), 400},
		{"trailing", volunteer(`{"max_experts":1} {}`), 400},
		{"no budget", volunteer(`{}`), 400},
		{"negative", volunteer(`{"max_experts":-1}`), 400},
		{"large body", volunteer(`{"max_experts":1}` + strings.Repeat(" ", MaxRequest)), 413},
		{"bad model", volunteer(`{"max_experts":1,"model":"x"}`), 400},
		{"unknown model", volunteer(`{"max_experts":1,"model":"` + modelB.String() + `"}`), 404},
		{"long name", volunteer(`{"max_experts":1,"worker":"` + long + `"}`), 400},
		{"name of control bytes", volunteer(`{"max_experts":1,"worker":"\u0007"}`), 400},
		{"no such layer", heartbeatOf(`{"worker":"A","holdings":[{"layer":1,"experts":[0,1]}]}`), 400},
		{"no such expert", heartbeatOf(`{"worker":"A","holdings":[{"layer":0,"experts":[0,257]}]}`), 400},
		{"empty range", heartbeatOf(`{"worker":"A","holdings":[{"layer":0,"experts":[5,5]}]}`), 400},
		{"overlap", heartbeatOf(`{"worker":"A","holdings":[{"layer":0,"experts":[0,5]},{"layer":0,"experts":[4,6]}]}`), 400},
		{"many holdings", heartbeatOf(`{"worker":"A","holdings":[` + strings.TrimSuffix(strings.Repeat(`{},`, maxHeldEntries+1), ",") + `]}`), 400},
	} {
		d := specDesk(t)
		err := tt.call(d)
		var got *RequestError
		if !errors.As(err, &got) || got.Status != tt.status {
			t.Errorf("%s: %v, want status %d", tt.name, err, tt.status)
		}
		if c := coverage(t, d.table, modelA, t0); c.Covered != 256 || c.AtTarget != 128 {
			t.Errorf("%s changed the coverage to %d and %d", tt.name, c.Covered, c.AtTarget)
		}
	}
	d := specDesk(t)
	for i := range maxWorkers + 1 {
		_, err := d.Coverage(fmt.Appendf(nil, `{"worker":"w%d","holdings":[]}`, i), "lan", t0)
		var full *RequestError
		if over := i >= maxWorkers-3; over != (errors.As(err, &full) && full.Status == 429) {
			t.Fatalf("worker %d: %v", i, err)
		}
	}
}

func volunteer(body string) func(*Desk) error {
	return func(d *Desk) error { _, err := d.Volunteer([]byte(body), "lan", t0); return err }
}

func heartbeatOf(body string) func(*Desk) error {
	return func(d *Desk) error { _, err := d.Coverage([]byte(body), "lan", t0); return err }
}

// TestManyNewcomersByHTTP has newcomers ask one after the other, each seeing the claims before.
func TestManyNewcomersByHTTP(t *testing.T) {
	d := NewDesk(newTable(t, Policy{Target: 250, Ceiling: 250}, modelA, oneLayer), nil)
	for i := range 1000 {
		at := t0.Add(time.Duration(i) * time.Millisecond)
		r, err := d.Volunteer(fmt.Appendf(nil, `{"worker":"w%d","max_experts":64}`, i), "", at)
		if err != nil {
			t.Fatal(i, err)
		}
		if r.Experts[1]-r.Experts[0] != 64 {
			t.Fatalf("worker %d was given %v", i, r.Experts)
		}
	}
	c := coverage(t, d.table, modelA, t0.Add(2*time.Second))
	for _, s := range c.Layers[0].Segments {
		if s.Claimed != 250 {
			t.Errorf("experts %v have %d claims, want 250", s.Experts, s.Claimed)
		}
	}
}

func FuzzDesk(f *testing.F) {
	f.Add(`{"worker":"A","holdings":[{"layer":0,"experts":[0,128]}]}`)
	f.Add(`{"worker":"D","max_experts":64}`)
	f.Add(`{"max_bytes":64,"model":"00"}`)
	f.Add(`{"max_bytes":64}`)
	f.Fuzz(func(t *testing.T, body string) {
		d := specDesk(t)
		_, err := d.Coverage([]byte(body), "lan", t0)
		if _, err2 := d.Volunteer([]byte(body), "lan", t0); err == nil && err2 == nil && body != "" {
			t.Errorf("%q is a heartbeat and a request", body)
		}
		coverage(t, d.table, modelA, t0)
	})
}
