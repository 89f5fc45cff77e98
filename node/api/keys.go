package api

// Paths of the keys of the gateway.
const (
	PathKeys       = "/v1/keys"        // GET → []Key; POST NewKey → CreatedKey
	PathRevokedKey = "/v1/keys/revoke" // POST RevokeKey → RevokedKey
)

// KeyLimits are what a key may use. Zero is no limit.
type KeyLimits struct {
	RequestsPerMinute int `json:"requests_per_minute,omitempty"`
	TokensPerMinute   int `json:"tokens_per_minute,omitempty"` // of prompts, but what was cached, and of answers
	Concurrent        int `json:"concurrent,omitempty"`        // requests at once
}

// Key is a key of the gateway, without what makes it one.
type Key struct {
	Name string `json:"name"`
	KeyLimits
	CreatedUnix int64 `json:"created_unix"`
	Admin       bool  `json:"admin,omitempty"` // it may act for the node's account at the settlement
	Spend       bool  `json:"spend,omitempty"` // its answers may be debited to the node's account, as an admin's
}

// NewKey asks for a key of that name: up to 64 of A-Z a-z 0-9 . _ -
type NewKey struct {
	Name string `json:"name"`
	KeyLimits
	Admin bool `json:"admin,omitempty"`
	Spend bool `json:"spend,omitempty"`
}

// CreatedKey is the only answer that has a key in it: the daemon keeps its hash.
type CreatedKey struct {
	Key    Key    `json:"key"`
	Secret string `json:"secret"` // what clients send
	Note   string `json:"note"`   // where it is asked for, or why it is not
}

// RevokeKey ends a key. Answers that run go on; what the name stored is kept for a
// later key of that name.
type RevokeKey struct {
	Name string `json:"name"`
}

// RevokedKey says that no request with the key is let in any more.
type RevokedKey struct {
	Left int `json:"left"` // keys
}
