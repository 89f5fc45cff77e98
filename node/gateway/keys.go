package gateway

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"sync"
	"time"
)

// Keys says who may ask and how much. It is safe for concurrent use.
type Keys interface {
	// Admit checks a key, "" when none came, in a time that does not depend on
	// it, and counts a request. Errors: *KeyError (401), or one with RetryAfter()
	// time.Duration (429) or PaymentRequired() bool (402).
	Admit(key string) (Grant, error)
}

// Grant is an admitted request.
type Grant struct {
	Owner string           // name of the key
	Spend bool             // as Key.Spend
	Done  func(tokens int) // ends the request; called once
}

// KeyError refuses a key. Its text never has the key in it.
type KeyError struct{ Missing bool }

func (e *KeyError) Error() string {
	if e.Missing {
		return "this gateway wants an API key: send it as \"Authorization: Bearer …\" or as \"x-api-key\""
	}
	return "the API key is not known here, or was revoked"
}

// Key is a key at rest and what it may use. A limit of 0 is none.
type Key struct {
	Name              string
	Hash              [sha256.Size]byte // HashKey of the key
	RequestsPerMinute int
	TokensPerMinute   int // of prompts, but what was cached, and of answers
	Concurrent        int
	Spend             bool // answers may be debited to the node's account
}

// HashKey is how a key is kept. Keys are long and random, so that a plain hash
// gives nothing away.
func HashKey(key string) [sha256.Size]byte { return sha256.Sum256([]byte("kvasir api key\x00" + key)) }

// KeyRing is Keys in memory.
type KeyRing struct {
	now func() time.Time

	mu   sync.Mutex // guards what follows
	keys []*ringKey
}

// ringKey is a key with what it used.
type ringKey struct {
	Key
	requests, tokens bucket
	running          int
}

// bucket fills by its limit in each minute. It may go below zero: what a request
// will cost is known when it is over.
type bucket struct {
	level float64
	at    time.Time
}

// NewKeyRing makes Keys of a list.
func NewKeyRing(list []Key, now func() time.Time) *KeyRing {
	k := &KeyRing{now: now}
	k.Set(list)
	return k
}

// Set replaces the list. A key that stays keeps what it used, unless its limits
// are new.
func (k *KeyRing) Set(list []Key) {
	k.mu.Lock()
	defer k.mu.Unlock()
	old := k.keys
	k.keys = nil
	for _, key := range list {
		r := &ringKey{Key: key, requests: full(key.RequestsPerMinute, k.now()), tokens: full(key.TokensPerMinute, k.now())}
		for _, o := range old {
			if o.Hash == key.Hash && o.RequestsPerMinute == key.RequestsPerMinute && o.TokensPerMinute == key.TokensPerMinute {
				r = o
				r.Key = key
			}
		}
		k.keys = append(k.keys, r)
	}
}

func full(limit int, now time.Time) bucket { return bucket{float64(limit), now} }

// Admit implements Keys.
func (k *KeyRing) Admit(key string) (Grant, error) {
	hash := HashKey(key)
	k.mu.Lock()
	defer k.mu.Unlock()
	var found *ringKey
	for _, r := range k.keys { // all are compared, so that time does not tell which
		if subtle.ConstantTimeCompare(hash[:], r.Hash[:]) == 1 {
			found = r
		}
	}
	if found == nil {
		return Grant{}, &KeyError{Missing: key == ""}
	}
	if err := found.admit(k.now()); err != nil {
		return Grant{}, err
	}
	done := func(tokens int) {
		k.mu.Lock()
		defer k.mu.Unlock()
		found.running--
		found.tokens.level -= float64(tokens)
	}
	return Grant{Owner: found.Name, Spend: found.Spend, Done: done}, nil
}

func (r *ringKey) admit(now time.Time) error {
	if r.Concurrent > 0 && r.running >= r.Concurrent {
		return &limitError{fmt.Sprintf("%d requests at once", r.Concurrent), time.Second}
	}
	if wait := r.tokens.fill(r.TokensPerMinute, now, 0); wait > 0 {
		return &limitError{fmt.Sprintf("%d tokens a minute", r.TokensPerMinute), wait}
	}
	if wait := r.requests.fill(r.RequestsPerMinute, now, 1); wait > 0 {
		return &limitError{fmt.Sprintf("%d requests a minute", r.RequestsPerMinute), wait}
	}
	r.requests.level--
	r.running++
	return nil
}

// fill adds what the time brought, and says how long it takes until the level is
// need, or above 0.
func (b *bucket) fill(limit int, now time.Time, need float64) time.Duration {
	if limit == 0 {
		return 0
	}
	rate := float64(limit) / 60 // a second
	b.level = min(float64(limit), b.level+rate*now.Sub(b.at).Seconds())
	b.at = now
	if b.level >= need && b.level > 0 {
		return 0
	}
	return max(time.Second, time.Duration((need-b.level)/rate*float64(time.Second)))
}

type limitError struct {
	what string
	wait time.Duration
}

func (e *limitError) Error() string             { return "the API key's limit of " + e.what + " is reached" }
func (e *limitError) RetryAfter() time.Duration { return e.wait }
