import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.BitSet;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Reads every offset of topics as a consumer does, compares the messages with the rows of a file, and answers with
 * everything that differs. tests/support/auditor.py describes the rows, the rules and the findings.
 */
@SuppressWarnings("deprecation")
public final class Auditor {
    private static final int THREADS = 4;
    private static final int AT_ONCE = 1000;

    private static final Set<String> SYSTEM = systemProperties();

    private final DefaultMQPullConsumer consumer;
    private final List<String> topics;
    private final List<Rule> identity;
    private final Rule variant;
    private final List<String> marks;
    private final Set<String> ignored;
    private final Set<String> compared;
    private final long deadline;
    private final long settles;
    private final Path path;
    private final Rows rows;
    private final Findings findings;
    private final int[] queueOfOrder;
    private final Set<Integer> moved = new HashSet<>();
    private final Map<Integer, String> variants = new HashMap<>();
    private final Set<Integer> mixed = new HashSet<>();
    private final Map<String, List<Long>> offsets = new TreeMap<>();
    private long messages;

    /** Where a text stands in a message: a property's name, or nothing for the body, and a pattern with one group. */
    private record Rule(String property, Pattern pattern) {
        static Rule of(String text) {
            return text == null ? null
                : new Rule(text.substring(0, text.indexOf(':')), Pattern.compile(text.substring(text.indexOf(':') + 1)));
        }

        String find(MessageExt message) {
            String text = property.isEmpty()
                ? new String(bodyOf(message), StandardCharsets.ISO_8859_1) : message.getProperty(property);
            Matcher matcher = text == null ? null : pattern.matcher(text);
            return matcher != null && matcher.matches() ? matcher.group(1) : null;
        }
    }

    public static void main(String[] files) {
        Lines.serve(files, lines -> {
            DefaultMQPullConsumer consumer = null;
            for (JSONObject request = lines.next(); request != null; request = lines.next()) {
                if (consumer == null) {
                    consumer = new DefaultMQPullConsumer("auditor");
                    consumer.setNamesrvAddr(request.getString("nameServer"));
                    consumer.setMqClientApiTimeout(30_000);
                    consumer.setConsumerPullTimeoutMillis(60_000);
                    consumer.start();
                }
                lines.answer(new Auditor(consumer, request).audit());
            }
        });
    }

    private Auditor(DefaultMQPullConsumer consumer, JSONObject request) throws Exception {
        this.consumer = consumer;
        topics = request.getList("topics", String.class);
        identity = request.getList("identity", String.class).stream().map(Rule::of).toList();
        variant = Rule.of(request.getString("variant"));
        marks = request.getList("marks", String.class);
        ignored = new HashSet<>(request.getList("ignored", String.class));
        compared = new HashSet<>(request.getList("compared", String.class));
        deadline = System.currentTimeMillis() + request.getLongValue("withinMs");
        settles = request.getLongValue("settlesMs");
        path = Path.of(request.getString("rows"));
        rows = new Rows(request.getIntValue("count"), marks.size());
        findings = new Findings(request.getIntValue("examples"));
        try (BufferedReader lines = Files.newBufferedReader(path, StandardCharsets.US_ASCII)) {
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                rows.add(JSON.parseObject(line));
            }
        }
        queueOfOrder = new int[rows.orders.size()];
        Arrays.fill(queueOfOrder, Rows.NONE);
    }

    private Map<String, Object> audit() throws Exception {
        ExecutorService threads = Executors.newFixedThreadPool(THREADS);
        List<Future<?>> reads = new ArrayList<>();
        settled().forEach((queue, range) -> {
            offsets.put(name(queue, true), List.of(range[0], range[1]));
            int number = reads.size();
            reads.add(threads.submit(() -> {
                read(queue, number, range[0], range[1]);
                return null;
            }));
        });
        for (Future<?> read : reads) {
            read.get();
        }
        threads.shutdown();
        long found = 0;
        long repeats = 0;
        int most = 0;
        for (int row = 0; row < rows.count(); row++) {
            found += rows.copies[row] > 0 ? 1 : 0;
            repeats += rows.repeats(row);
            most = Math.max(most, rows.copies[row]);
            if (rows.missing(row) > 0) {
                findings.add("missing", row, null, 0, 1, null);
            }
        }
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("rows", rows.count());
        answer.put("messages", messages);
        answer.put("found", found);
        answer.put("repeats", repeats);
        answer.put("most", most);
        answer.put("offsets", offsets);
        answer.put("findings", findings.describe(path));
        return answer;
    }

    /** Returns the first and next offset of each queue, once all rows can be there and nothing is added any more. */
    private Map<MessageQueue, long[]> settled() throws Exception {
        long total = -1;
        long since = System.currentTimeMillis();
        while (true) {
            Map<MessageQueue, long[]> ranges = new TreeMap<>();
            boolean known = true;
            try {
                for (MessageQueue queue : queues()) {
                    // A BatchCQ queue without messages begins at -1.
                    long start = Math.max(0, consumer.minOffset(queue));
                    ranges.put(queue, new long[] {start, Math.max(start, consumer.maxOffset(queue))});
                }
            } catch (MQClientException recovering) {
                if (System.currentTimeMillis() >= deadline) {
                    throw recovering;
                }
                known = false;
            }
            long now = ranges.values().stream().mapToLong(range -> range[1] - range[0]).sum();
            long time = System.currentTimeMillis();
            if (now != total) {
                total = now;
                since = time;
            }
            if (known && time - since >= settles && (total >= rows.required || time >= deadline)) {
                return ranges;
            }
            Thread.sleep(50);
        }
    }

    private Set<MessageQueue> queues() {
        Set<MessageQueue> found = new HashSet<>();
        for (String topic : topics) {
            try {
                found.addAll(consumer.fetchSubscribeMessageQueues(topic));
            } catch (MQClientException unknown) {
                // The name server does not know the topic, so it has no queues.
            }
        }
        return found;
    }

    private void read(MessageQueue queue, int number, long start, long end) throws Exception {
        QueueState state = new QueueState(queue, number, start, end);
        while (state.next < end) {
            PullResult result = pull(queue, state.next, AT_ONCE);
            if (result != null && state.take(result)) {
                continue;
            }
            // The client ends a list before a message that it cannot decode.
            result = pull(queue, state.next, 1);
            long skipped = state.next;
            if (result == null || result.getPullStatus() == PullStatus.FOUND) {
                if (result == null || !state.take(result)) {
                    state.next = skipped + 1;
                    add("unreadable", Rows.NONE, queue, skipped, 1, null);
                }
            } else {
                boolean ends = result.getNextBeginOffset() <= skipped || result.getNextBeginOffset() > end;
                state.next = ends ? end : result.getNextBeginOffset();
                add("gap", Rows.NONE, queue, skipped, state.next - skipped, null);
            }
        }
    }

    private PullResult pull(MessageQueue queue, long offset, int count) throws Exception {
        try {
            return consumer.pull(queue, "*", offset, count);
        } catch (RuntimeException undecodable) {
            return null;
        }
    }

    private synchronized void add(String kind, int row, MessageQueue queue, long offset, long times, MessageExt message) {
        findings.add(kind, row, queue, offset, times, message);
    }

    /** Returns the names of RocketMQ's own properties. Its set of them lacks some, such as those of transactions. */
    private static Set<String> systemProperties() {
        Set<String> names = new HashSet<>(MessageConst.STRING_HASH_SET);
        for (Field field : MessageConst.class.getFields()) {
            if (field.getName().startsWith("PROPERTY_")) {
                try {
                    names.add((String) field.get(null));
                } catch (IllegalAccessException impossible) {
                    throw new IllegalStateException(impossible);
                }
            }
        }
        return names;
    }

    /** Returns the body of a message; the client has none for an empty one. */
    static byte[] bodyOf(MessageExt message) {
        return message.getBody() == null ? new byte[0] : message.getBody();
    }

    private static String name(MessageQueue queue, boolean whole) {
        return (whole ? queue.getTopic() + "/" : "") + queue.getBrokerName() + "/" + queue.getQueueId();
    }

    /** The messages of a queue in their order. */
    private final class QueueState {
        private final MessageQueue queue;
        private final int number;
        private final long end;
        private final BitSet seen = new BitSet();
        private final int[] lastOfOrder = new int[queueOfOrder.length];
        private long next;
        private long logOffset = -1;

        QueueState(MessageQueue queue, int number, long start, long end) {
            this.queue = queue;
            this.number = number;
            this.end = end;
            this.next = start;
            Arrays.fill(lastOfOrder, Rows.NONE);
        }

        /** Takes the messages of an answer, and returns whether there were any. */
        boolean take(PullResult result) {
            List<MessageExt> found = result.getPullStatus() == PullStatus.FOUND ? result.getMsgFoundList() : null;
            long before = next;
            synchronized (Auditor.this) {
                for (MessageExt message : found == null ? List.<MessageExt>of() : found) {
                    long offset = message.getQueueOffset();
                    // A stored unit of several messages can begin before, and later writes can come after.
                    if (offset < next || offset >= end) {
                        continue;
                    }
                    if (offset > next) {
                        findings.add("gap", Rows.NONE, queue, next, offset - next, null);
                    }
                    next = offset + 1;
                    check(message, offset);
                }
            }
            return next > before;
        }

        private void check(MessageExt message, long offset) {
            messages++;
            if (message.getCommitLogOffset() < logOffset) {
                findings.add("logOrder", Rows.NONE, queue, offset, 1, message);
            }
            logOffset = message.getCommitLogOffset();
            int row = identify(message);
            if (row == Rows.NONE) {
                findings.add("foreign", row, queue, offset, 1, message);
                return;
            }
            rows.copies[row]++;
            List<String> kinds = new ArrayList<>();
            if (rows.repeats(row) > 0 && !rows.mayRepeat(row)) {
                kinds.add("repeated");
            }
            checkPlace(row, kinds);
            checkContent(message, row, kinds);
            checkMarks(message, row, kinds);
            checkOrder(row, kinds);
            kinds.forEach(kind -> findings.add(kind, row, queue, offset, 1, message));
        }

        private void checkPlace(int row, List<String> kinds) {
            if (rows.topic[row] != rows.topics.getOrDefault(queue.getTopic(), Rows.NONE)) {
                kinds.add("wrongTopic");
            } else if (rows.queue[row] != Rows.NONE
                && rows.queue[row] != rows.queues.getOrDefault(name(queue, false), Rows.NONE)) {
                kinds.add("wrongQueue");
            }
        }

        private void checkContent(MessageExt message, int row, List<String> kinds) {
            if (!rows.hasBody(row, bodyOf(message))) {
                kinds.add(rows.findBody(bodyOf(message)) == Rows.NONE ? "changedBody" : "bodyOfAnotherRow");
            }
            Map<String, String> properties = new HashMap<>(message.getProperties());
            properties.keySet().removeIf(name -> ignored.contains(name)
                || SYSTEM.contains(name) && !compared.contains(name));
            Rows.Fields fields = Rows.Fields.of(message.getTags(), message.getKeys(), properties);
            if (!rows.hasTag(row, fields)) {
                kinds.add("wrongTag");
            }
            if (!rows.hasKeys(row, fields)) {
                kinds.add("wrongKeys");
            }
            if (!rows.hasNames(row, fields)) {
                kinds.add(fields.properties() > rows.properties(row) ? "addedProperty" : "lostProperty");
            } else if (rows.pairs[row] != fields.pairs()) {
                kinds.add("changedProperty");
            }
            String found = variant == null ? null : variant.find(message);
            if (found != null && !variants.computeIfAbsent(rows.unit[row], added -> found).equals(found)
                && mixed.add(rows.unit[row])) {
                kinds.add("mixedVariants");
            }
        }

        private void checkMarks(MessageExt message, int row, List<String> kinds) {
            for (int number = 0; number < marks.size(); number++) {
                long found = Rows.hash(String.valueOf(message.getProperty(marks.get(number))));
                if (rows.copies[row] == 1) {
                    rows.marks[number][row] = found;
                } else if (rows.marks[number][row] != found) {
                    kinds.add("marksDiffer");
                }
                if (rows.marked[number].put(found, row) != row) {
                    kinds.add("markShared");
                }
            }
        }

        private void checkOrder(int row, List<String> kinds) {
            int order = rows.order[row];
            if (order == Rows.NONE || seen.get(row)) {
                return;
            }
            seen.set(row);
            if (queueOfOrder[order] == Rows.NONE) {
                queueOfOrder[order] = number;
            } else if (queueOfOrder[order] != number && moved.add(order)) {
                kinds.add("keyInTwoQueues");
            }
            if (lastOfOrder[order] > row) {
                kinds.add("order");
            }
            lastOfOrder[order] = Math.max(lastOfOrder[order], row);
        }

        private int identify(MessageExt message) {
            for (Rule rule : identity) {
                int row = rows.find(rule.find(message));
                if (row != Rows.NONE) {
                    return row;
                }
            }
            return rows.findBody(bodyOf(message));
        }
    }
}
