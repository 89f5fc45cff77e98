package settle

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

const (
	memoPrefix   = "kvr1:"
	secretDomain = "kvasir claim secret 1\n"

	// MaxModelName is in bytes.
	MaxModelName = 128
	// MaxQuoteSeconds is how long an unpaid quote is open, at most.
	MaxQuoteSeconds = 600
	// LateSeconds is for how long after a quote's end a payment may still be named that
	// was made in time: it takes a while to be final, and its payer may call again later.
	LateSeconds = 600
	// MaxTokens of one request, prompt and answer each.
	MaxTokens = 1 << 24
)

// QuoteID is 128 random bits: it names a quote, its payment and its request.
type QuoteID [16]byte

// Memo is what the payment carries, byte for byte.
func (id QuoteID) Memo() string { return memoPrefix + id.String() }

// String is 32 hexadecimal digits in lower case.
func (id QuoteID) String() string { return hex.EncodeToString(id[:]) }

// MarshalText is String.
func (id QuoteID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText is ParseQuoteID.
func (id *QuoteID) UnmarshalText(text []byte) (err error) {
	*id, err = ParseQuoteID(string(text))
	return err
}

// ParseQuoteID reads 32 hexadecimal digits in lower case.
func ParseQuoteID(s string) (id QuoteID, err error) {
	if len(s) == 2*len(id) && s == strings.ToLower(s) {
		if b, err := hex.DecodeString(s); err == nil {
			copy(id[:], b)
			return id, nil
		}
	}
	return QuoteID{}, fmt.Errorf("quote id %.40q is not 32 hexadecimal digits in lower case", s)
}

// ParseMemo reads the memo of a payment.
func ParseMemo(memo string) (QuoteID, error) {
	s, ok := strings.CutPrefix(memo, memoPrefix)
	if !ok {
		return QuoteID{}, fmt.Errorf("memo %.60q does not begin with %s", memo, memoPrefix)
	}
	return ParseQuoteID(s)
}

// HashSecret is what is kept of a claim secret.
func HashSecret(secret []byte) Hash {
	return sha256.Sum256(append([]byte(secretDomain), secret...))
}

// Quote is a price that holds until it expires, for one request.
type Quote struct {
	ID           QuoteID
	Model        string
	PromptTokens uint64 // limits
	AnswerTokens uint64
	Amount       Amount // of all tokens within the limits
	RequestHash  Hash
	PriceRecord  Hash // the signed record of the epoch's price
	PriceRaw     uint64
	Ref          uint64
	Entry        Node   // which alone may report the request
	Owner        Wallet // who must pay; zero: whoever pays
	CreatedSlot  uint64
	Created      uint64 // Unix seconds
	Expires      uint64
	ClaimHash    Hash // HashSecret of what its asker was given once
}

// Refusals of a quote.
var (
	ErrQuote    = errors.New("the quote is not well formed")
	ErrStaleRef = errors.New("the price reference is too old: governance must sign a new one")
)

// NewQuote prices q: it sets Amount to the charge of its tokens, at least MinQuote. refAge
// is how long ago the reference was signed, in seconds. Errors: ErrQuote, ErrStaleRef,
// ErrCharge.
func NewQuote(q Quote, refAge uint64) (Quote, error) {
	if refAge > RefRefuseAfter {
		return Quote{}, fmt.Errorf("%w: %d days", ErrStaleRef, refAge/Day)
	}
	if q.PromptTokens > MaxTokens || q.AnswerTokens > MaxTokens {
		return Quote{}, fmt.Errorf("%w: %d + %d tokens, at most %d each", ErrQuote, q.PromptTokens, q.AnswerTokens, MaxTokens)
	}
	a, err := Charge(q.PromptTokens+q.AnswerTokens, q.PriceRaw, q.Ref)
	if err != nil {
		return Quote{}, err
	}
	q.Amount = max(a, MinQuote)
	return q, q.check()
}

func (q Quote) check() error {
	bad := ""
	switch {
	case q.ID == QuoteID{}:
		bad = "it has no id"
	case q.Model == "" || len(q.Model) > MaxModelName || !utf8.ValidString(q.Model):
		bad = fmt.Sprintf("the model's name is not 1 to %d bytes of UTF-8", MaxModelName)
	case q.PromptTokens+q.AnswerTokens == 0 || q.PromptTokens > MaxTokens || q.AnswerTokens > MaxTokens:
		bad = fmt.Sprintf("%d + %d tokens, at most %d each", q.PromptTokens, q.AnswerTokens, MaxTokens)
	case q.Amount < MinQuote:
		bad = fmt.Sprintf("an amount of %d, at least %d", q.Amount, MinQuote)
	case q.Expires <= q.Created || q.Expires-q.Created > MaxQuoteSeconds:
		bad = fmt.Sprintf("open for %d s, 1 to %d", q.Expires-q.Created, MaxQuoteSeconds)
	case q.RequestHash == Hash{} || q.PriceRecord == Hash{} || q.ClaimHash == Hash{}:
		bad = "the hash of the request, the price record or the claim secret is missing"
	case q.Entry == Node{}:
		bad = "it names no entry node"
	default:
		return nil
	}
	return fmt.Errorf("%w: %s", ErrQuote, bad)
}

// Used is what so many delivered tokens cost of the quote.
func (q Quote) Used(tokens uint64) (Amount, error) {
	if tokens == 0 {
		return 0, nil
	}
	a, err := Charge(tokens, q.PriceRaw, q.Ref)
	return min(a, q.Amount), err
}

// Opens says whether the secret is the one that the quote's asker was given.
func (q Quote) Opens(secret []byte) bool {
	h := HashSecret(secret)
	return subtle.ConstantTimeCompare(h[:], q.ClaimHash[:]) == 1
}
