package kv

import (
	"fmt"
	"log/slog"
	"strings"

	"github.com/dgraph-io/badger/v4"
	badgeropts "github.com/dgraph-io/badger/v4/options"
)

// Sizes that suit a machine whose owner uses it for something else: badger's own
// would take some 300 MB.
const (
	memtableBytes  = 2 << 20
	baseTableBytes = 2 << 20
	baseLevelBytes = 8 << 20
	maxLevels      = 4       // tables double from level to level, to 8 MB
	logFileBytes   = 1 << 20 // of the value log, which holds no value
	inTableBytes   = 2 * maxPart
)

// options keep every value in badger's tables: its value log gives back room only
// by what compaction tells it, which is late where heads are few and values large.
// Without compression no cache of blocks is needed, as tables are mapped.
func options(cfg Config) badger.Options {
	return badger.DefaultOptions(cfg.Path).
		WithLogger(badgerLog{cfg.Logger}).
		WithMemTableSize(memtableBytes).WithNumMemtables(1).
		WithBaseTableSize(baseTableBytes).WithBaseLevelSize(baseLevelBytes).WithMaxLevels(maxLevels).
		WithNumCompactors(0).WithNumLevelZeroTablesStall(1 << 20). // see reclaim
		WithNumGoroutines(1).
		WithValueLogFileSize(logFileBytes).WithValueThreshold(inTableBytes).
		WithCompression(badgeropts.None).WithBlockCacheSize(0).WithIndexCacheSize(0).
		WithChecksumVerificationMode(badgeropts.OnBlockRead).
		WithDetectConflicts(false).WithMetricsEnabled(false).
		WithBypassLockGuard(true) // the state file is the lock
}

// badgerLog passes on what a person may need to know.
type badgerLog struct{ log *slog.Logger }

func (l badgerLog) Errorf(format string, args ...any) {
	l.log.Warn("the store of values reports an error", "err", strings.TrimSpace(fmt.Sprintf(format, args...)))
}

func (l badgerLog) Warningf(format string, args ...any) {
	l.log.Debug("the store of values warns", "text", strings.TrimSpace(fmt.Sprintf(format, args...)))
}

func (badgerLog) Infof(string, ...any)  {}
func (badgerLog) Debugf(string, ...any) {}
