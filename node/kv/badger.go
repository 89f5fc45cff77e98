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
	memtableBytes = 64 << 10
	tableBytes    = 1 << 20
	levelBytes    = 4 << 20
	maxLevels     = 4
	logFileBytes  = 16 << 20 // of the value log
	inTableBytes  = 1 << 10  // values below that are in the tables: heads, and small parts
)

// options keep the parts of values in badger's value log, so that its tables stay
// small and quick to merge. The value log learns what is not needed any more when
// tables are merged, and a table is only written out when it is full of records. So
// that this takes no more than some 20 MB that are put, it is small, and a value has a
// record for every maxPart bytes. Without compression no cache of blocks is needed,
// as files are mapped.
func options(cfg Config) badger.Options {
	return badger.DefaultOptions(cfg.Path).
		WithLogger(badgerLog{cfg.Logger}).
		WithMemTableSize(memtableBytes).WithNumMemtables(1).
		WithBaseTableSize(tableBytes).WithBaseLevelSize(levelBytes).WithMaxLevels(maxLevels).
		WithNumCompactors(0).WithNumLevelZeroTables(1).WithNumLevelZeroTablesStall(1 << 20). // see reclaim
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
