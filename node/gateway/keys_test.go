package gateway

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestKeyRing(t *testing.T) {
	now := time.Unix(1700000000, 0)
	ring := NewKeyRing([]Key{
		{Name: "a", Hash: HashKey("ka"), RequestsPerMinute: 2},
		{Name: "b", Hash: HashKey("kb"), TokensPerMinute: 60},
		{Name: "c", Hash: HashKey("kc"), Concurrent: 1},
	}, func() time.Time { return now })
	refused := func(key, reason string, wait time.Duration) {
		t.Helper()
		_, err := ring.Admit(key)
		var limit interface{ RetryAfter() time.Duration }
		if err == nil || !strings.Contains(err.Error(), reason) || strings.Contains(err.Error(), key) && key != "" {
			t.Fatalf("%q: %v, want %q", key, err, reason)
		}
		if errors.As(err, &limit) != (wait > 0) || wait > 0 && limit.RetryAfter() != wait {
			t.Errorf("%q: %v, want to wait for %v", key, err, wait)
		}
	}
	admitted := func(key, name string) Grant {
		t.Helper()
		g, err := ring.Admit(key)
		if err != nil || g.Owner != name {
			t.Fatalf("%q: %v, %q, want %q", key, err, g.Owner, name)
		}
		return g
	}
	refused("", "wants an API key", 0)
	refused("kd", "not known", 0)

	admitted("ka", "a").Done(1000)
	admitted("ka", "a").Done(0)
	refused("ka", "2 requests a minute", 30*time.Second)
	now = now.Add(29 * time.Second)
	refused("ka", "2 requests a minute", time.Second)
	now = now.Add(time.Second)
	admitted("ka", "a").Done(0)
	now = now.Add(time.Hour) // what is not used is lost
	admitted("ka", "a").Done(0)
	admitted("ka", "a").Done(0)
	refused("ka", "2 requests a minute", 30*time.Second)

	admitted("kb", "b").Done(90)
	refused("kb", "60 tokens a minute", 30*time.Second)
	now = now.Add(31 * time.Second)
	admitted("kb", "b").Done(0)

	held := admitted("kc", "c")
	refused("kc", "1 requests at once", time.Second)
	held.Done(0)
	held = admitted("kc", "c")

	ring.Set([]Key{{Name: "c", Hash: HashKey("kc"), Concurrent: 1}, {Name: "b", Hash: HashKey("kb"), TokensPerMinute: 60, Concurrent: 9}})
	refused("kc", "1 requests at once", time.Second) // a key that stays keeps what runs
	refused("ka", "not known", 0)
	held.Done(0)
	admitted("kc", "c").Done(0)
}

// A key pays for the prompt and the answer, and its place comes back.
func TestKeysCount(t *testing.T) {
	prompt := len("<|im_start|>user\nhi<|im_end|>\n" + asked)
	now := time.Unix(1700000000, 0)
	url, _ := serveCases(t, &scriptEngine{pieces: []string{"a", "b"}, cached: 2}, func(c *Config) {
		c.Keys = NewKeyRing([]Key{{Hash: HashKey("k"), TokensPerMinute: prompt * 4, Concurrent: 1}}, func() time.Time { return now })
	})
	for path, request := range map[string]string{chatPath: body(), messagesPath: body(`"max_tokens":1`), responsesPath: input(`"hi"`), "/v1/completions": `{"model":"qwen","prompt":"hi"}`} {
		now = now.Add(time.Hour)
		for n := 0; ; n++ {
			status, _, text := send(t, url+path, request, "x-api-key", "k")
			if status == 429 && n > 1 && strings.Contains(text, "tokens a minute") {
				break
			}
			if status != 200 || n > 4*prompt {
				t.Fatalf("%s, request %d: %d %s", path, n, status, text)
			}
		}
	}
}
