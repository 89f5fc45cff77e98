//go:build sdk && cgo && linux

package node

import (
	"errors"
	"net/http"
	"testing"

	"github.com/anthropics/anthropic-sdk-go/v2"
	anthropicoption "github.com/anthropics/anthropic-sdk-go/v2/option"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"kvasird/node/api"
)

// TestOpenAIKeys: clients send the key as they do by themselves, and see what is
// wrong with it, and its limits, as their own types. TestAnthropicKeys likewise.
func TestOpenAIKeys(t *testing.T) {
	s, key := keyedDaemon(t, api.KeyLimits{RequestsPerMinute: 1})
	p := openai.ChatCompletionNewParams{Model: shippedModel, Messages: user(sumQuestion), Temperature: openai.Float(0)}
	client := s.openAI(option.WithAPIKey(key))
	if c, err := client.Chat.Completions.New(s.ctx, p); err != nil || c.Choices[0].Message.Content != sumAnswer {
		t.Error(openAIError(err))
	}
	var failed *openai.Error
	if _, err := client.Chat.Completions.New(s.ctx, p); !errors.As(err, &failed) || failed.StatusCode != http.StatusTooManyRequests ||
		failed.Code != "rate_limit_exceeded" || failed.Response.Header.Get("Retry-After") == "" {
		t.Errorf("beyond the limit: %s", openAIError(err))
	}
	for _, wrong := range []string{"none is asked for", key[:len(key)-1]} {
		client := s.openAI(option.WithAPIKey(wrong))
		if _, err := client.Models.List(s.ctx); !errors.As(err, &failed) || failed.StatusCode != http.StatusUnauthorized || failed.Code != "invalid_api_key" {
			t.Errorf("key %q: %s", wrong, openAIError(err))
		}
	}
}

func TestAnthropicKeys(t *testing.T) {
	s, key := keyedDaemon(t, api.KeyLimits{})
	p := anthropic.MessageNewParams{Model: shippedModel, MaxTokens: 64, Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(sumQuestion))}}
	for _, opt := range []anthropicoption.RequestOption{anthropicoption.WithAPIKey(key), anthropicoption.WithAuthToken(key)} {
		client := anthropic.NewClient(anthropicoption.WithBaseURL("http://"+s.http), opt, anthropicoption.WithMaxRetries(0))
		if m, err := client.Messages.New(s.ctx, p, anthropicoption.WithJSONSet("temperature", 0)); err != nil || messageText(m) != sumAnswer {
			t.Error(anthropicError(err))
		}
	}
	var failed *anthropic.Error
	client := s.anthropic("")
	if _, err := client.Messages.New(s.ctx, p); !errors.As(err, &failed) || failed.StatusCode != http.StatusUnauthorized || failed.Type() != "authentication_error" {
		t.Errorf("with no key: %s", anthropicError(err))
	}
}

// keyedDaemon asks for a key, and there is one.
func keyedDaemon(t *testing.T, limits api.KeyLimits) (*swarm, string) {
	t.Helper()
	d := newDoor(t, "require_key = true\n")
	d.begin("--experts", ExpertsHere)
	return d.swarm, d.addKey(api.NewKey{Name: "phone", KeyLimits: limits}).Secret
}
